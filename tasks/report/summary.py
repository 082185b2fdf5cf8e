"""The counts of a run, and the table that ends it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from rich.markup import escape
from rich.table import Table

from tasks.report.progress import Progress
from tasks.vocabulary import Verdict

LISTED = 100  # quarantined samples and failed chunks that are named


@dataclass(frozen=True)
class Outcome:
    """What became of one chunk's missing samples."""

    extracted: int
    """Samples committed."""
    tokens: int
    state_bytes: int
    """Bytes of the committed states before encoding."""
    stored_bytes: int
    """Bytes of their files."""
    reused_rows: int = 0
    """Rows of their states that were computed for another sample with the same prefix."""
    refused: Sequence[Verdict] = ()


@dataclass
class Summary:
    """What became of everything that a run was asked for."""

    store: str
    input: Any = None
    """What the tokenizer says of the input (:class:`tasks.tokenize.report.TokenizeReport`)."""
    extracted: int = 0
    """Distinct samples extracted, verified and committed by this run."""
    reused: int = 0
    """Distinct samples that were in the store already."""
    quarantined: list[Verdict] = field(default_factory=list)
    retried: int = 0
    """Samples that failed and were extracted once more."""
    halted: str | None = None
    """Why extracting was stopped early."""
    continuation: Any = None
    """What the model went on with when the engine started (:class:`tasks.verify.probe.Continuation`)."""
    chunks: int = 0
    """Chunks of the plan."""
    failed_chunks: dict[str, str] = field(default_factory=dict)
    """Chunk name -> why it did not end; its samples are not in the store."""
    tokens: int = 0
    """Tokens of the extracted samples."""
    state_bytes: int = 0
    stored_bytes: int = 0
    reused_rows: int = 0
    """Rows that were computed for another sample with the same prefix."""
    recomputed: int = 0
    """Samples computed again, since rows that they were to reuse were no longer held."""
    tokens_per_second: float = 0.0
    """Of the engine, from when it was ready."""
    engine_started: bool = False
    seconds: float = 0.0
    _began: float = field(default_factory=monotonic)

    def add(self, outcome: Outcome) -> None:
        """Count one chunk."""
        self.extracted += outcome.extracted
        self.tokens += outcome.tokens
        self.state_bytes += outcome.state_bytes
        self.stored_bytes += outcome.stored_bytes
        self.reused_rows += outcome.reused_rows
        self.quarantined.extend(outcome.refused)

    def add_retry(self, outcome: Outcome, key: str) -> None:
        """Count a quarantined sample that was extracted once more."""
        self.quarantined = [verdict for verdict in self.quarantined if verdict.key != key]
        self.retried += 1
        self.add(outcome)

    def finish(self, progress: Progress, engine_started: bool) -> None:
        """Note what is known at the end only."""
        self.tokens_per_second = progress.tokens_per_second
        self.engine_started = engine_started
        self.seconds = monotonic() - self._began

    @property
    def complete(self) -> bool:
        """Whether all samples of the input are in the store; skipped rows of the input are no samples."""
        return not self.quarantined and not self.failed_chunks

    @property
    def skipped(self) -> int:
        """Rows of the input that gave no sample."""
        return sum(self.input.skipped.values())

    @property
    def ratio(self) -> float:
        """Bytes of states per byte stored."""
        return self.state_bytes / self.stored_bytes if self.stored_bytes else 0.0

    @property
    def message(self) -> str:
        """One line, for the state of the flow run."""
        parts = [f"{self.extracted} extracted", f"{self.reused} reused"]
        if self.failed_chunks:
            listed = sorted(self.failed_chunks)[:10]
            names = ", ".join(listed + ["..."] * (len(self.failed_chunks) > len(listed)))
            parts.insert(0, f"{len(self.failed_chunks)}/{self.chunks} chunks failed ({names})")
        if self.quarantined:
            parts.append(f"{len(self.quarantined)} quarantined")
        if self.halted:
            parts.append(f"stopped: {self.halted}")
        if self.skipped:
            parts.append(f"{self.skipped} input rows skipped")
        return ", ".join(parts)

    def markdown(self) -> str:
        """The summary for the Prefect UI."""
        return f"**{self.message}**\n\n{markdown_table(self.lines())}"

    def lines(self) -> list[tuple[str, str]]:
        """What there is to say, as names and values."""
        engine = f"started, {self.tokens_per_second:,.0f} tokens/s" if self.engine_started else "not started"
        written = f"{self.stored_bytes / 1e6:,.1f} MB for {self.state_bytes / 1e6:,.1f} MB of states"
        found = [
            ("chunks", f"{self.chunks}, of which {len(self.failed_chunks)} failed"),
            ("extracted", f"{self.extracted} samples, {self.tokens:,} tokens"),
            ("reused", f"{self.reused} samples"),
            ("quarantined", f"{len(self.quarantined)} samples"),
            ("retried", f"{self.retried} samples"),
            *self.input.lines(),
            ("engine", engine),
            ("written", f"{written}, ratio {self.ratio:.2f}" if self.extracted else "nothing"),
            ("time", f"{self.seconds:,.1f} s"),
            ("store", self.store),
        ]
        if self.reused_rows or self.recomputed:
            share = self.reused_rows / self.tokens if self.tokens else 0.0
            again = f"; {self.recomputed} samples computed again" if self.recomputed else ""
            found.insert(-4, ("prefixes", f"{self.reused_rows:,} rows reused, {share:.0%}{again}"))
        if self.continuation is not None:
            found.append(("the model goes on", str(self.continuation)))
        if self.halted:
            found.append(("stopped", self.halted))
        found += [(f"quarantined {v.key[:12]}", f"{v.reason}: {v.detail}") for v in self.quarantined[:LISTED]]
        found += [(f"failed {name}", why) for name, why in list(self.failed_chunks.items())[:LISTED]]
        return found

    def table(self) -> Table:
        """The table for a terminal."""
        table = Table(title="Extraction", title_justify="left", show_header=False)
        for name, value in self.lines():
            table.add_row(escape(name), escape(value))
        return table


def markdown_table(lines: Sequence[tuple[str, str]]) -> str:
    """Names and values as a table of two columns."""
    return "\n".join(["| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in lines)])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
