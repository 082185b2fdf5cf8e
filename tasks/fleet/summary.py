"""What became of everything that a fleet was asked for."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.markup import escape
from rich.table import Table

from tasks.fleet.follow import ShardEnd
from tasks.report.summary import markdown_table


@dataclass
class FleetSummary:
    """Counts of a fleet's run. What is in the store is counted there, not by what nodes say of themselves."""

    store: str
    input: Any = None
    """What the tokenizer says of the input (:class:`tasks.tokenize.report.TokenizeReport`)."""
    reused: int = 0
    """Distinct samples that were in the store at the beginning."""
    extracted: int = 0
    """Distinct samples that were not, and are at the end."""
    tokens: int = 0
    """Tokens of these."""
    left: int = 0
    """Samples that are not in the store at the end."""
    quarantined: int = 0
    """Of these, how many the verification refused."""
    shards: Sequence[ShardEnd] = ()
    seconds: float = 0.0
    _began: float = field(default_factory=monotonic)

    def finish(self, shards: Sequence[ShardEnd]) -> None:
        """Note what is known at the end only."""
        self.shards = shards
        self.seconds = monotonic() - self._began

    @property
    def complete(self) -> bool:
        """Whether all samples of the input are in the store, whatever became of single nodes."""
        return not self.left

    @property
    def message(self) -> str:
        """One line, for the state of the flow run."""
        done = sum(end.completed for end in self.shards)
        parts = [f"{self.extracted} extracted", f"{self.reused} reused", f"{done}/{len(self.shards)} shards completed"]
        if again := sum(len(end.runs) - 1 for end in self.shards if end.runs):
            parts.append(f"{again} issued again")
        if self.left:
            parts.append(f"{self.left} samples missing, {self.quarantined} of them quarantined")
        return ", ".join(parts)

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as names and values."""
        found = [
            ("extracted", f"{self.extracted} samples, {self.tokens:,} tokens"),
            ("reused", f"{self.reused} samples"),
            ("missing", f"{self.left} samples, {self.quarantined} of them quarantined"),
            *(self.input.lines() if self.input else ()),
            ("time", f"{self.seconds:,.1f} s"),
            ("store", self.store),
        ]
        for end in self.shards:
            runs = " → ".join(end.runs)
            found.append((end.shard.name, f"{end.state}: {end.message}" + (f" ({runs})" if runs else "")))
        return found

    def markdown(self) -> str:
        """The summary for the Prefect UI."""
        return f"**{self.message}**\n\n{markdown_table(self.lines())}"

    def table(self) -> Table:
        """The table for a terminal."""
        table = Table(title="Extraction by a fleet", title_justify="left", show_header=False)
        for name, value in self.lines():
            table.add_row(escape(name), escape(value))
        return table
