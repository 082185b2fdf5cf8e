"""What became of the rows of the data."""

from dataclasses import dataclass, field
from typing import Literal

from tasks.tokenize.errors import NoSamples, Problem

MAX_PROBLEMS = 100

Method = Literal["markers", "prefixes", "family"]
How = Literal[Method, "text", "given"]
"""How a loss mask came about: by a method of :mod:`tasks.tokenize.mask`, all of a text, or with the row."""


LIST_ALL = "`layertap tokenize PRESET --skipped` lists all"


@dataclass(frozen=True)
class SharedId:
    """An id that stands for samples of different content."""

    id: str
    first: str
    """Place of the first row that loses the id, as file:line."""
    last: str
    """Place of the row that the id names."""

    def __str__(self) -> str:
        return (
            f"the id {self.id!r} stands for different tokens or loss masks at {self.first} and {self.last}: it names "
            "the last of them, and the states of the others can be read by key only; give each an id of its own"
        )


@dataclass
class TokenizeReport:
    """What became of the rows."""

    read: int = 0
    kept: int = 0
    """Samples in the table."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows without a sample, by reason."""
    truncated: int = 0
    tokens_cut: int = 0
    """Tokens beyond the longest sample's, of the rows that were truncated."""
    split: int = 0
    """Rows that became several samples."""
    tokens: int = 0
    supervised_tokens: int = 0
    duplicates: int = 0
    """Samples with the same key as an earlier one."""
    ids_used_twice: int = 0
    """Source ids that stand for samples of different content."""
    shared_ids: list[SharedId] = field(default_factory=list)
    """The first of these, at most :data:`MAX_PROBLEMS`."""
    methods: dict[How, int] = field(default_factory=dict)
    """Samples by how their loss mask came about."""
    counts: dict[str, int] = field(default_factory=dict)
    """Turns by role and tool calls in the table; and what is worth a note:

    * ``control_tokens_as_text``: rows whose text holds a control token, read as ordinary text.
    * ``reasoning_left_out``: turns whose reasoning the template does not write.
    * ``turns_without_end_token``: turns that the template does not end with a control token.
    * ``ends_inside_a_token``: turns whose first characters share a token with their header and are not supervised.
    """
    unread: dict[str, int] = field(default_factory=dict)
    """Samples' rows that hold another schema, too, which is not read; by the names of the fields."""
    by_source: list[int] = field(default_factory=list)
    """Rows read from each source."""
    problems: list[Problem] = field(default_factory=list)
    """The first rows without a sample, at most :data:`MAX_PROBLEMS`."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def reasons(self) -> str:
        """Counts of the rows without a sample, the most frequent reason first."""
        ordered = sorted(self.skipped.items(), key=lambda counted: -counted[1])
        return ", ".join(f"{count:,} {reason}" for reason, count in ordered)

    def lines(self) -> list[tuple[str, str]]:
        """What a run's summary says of its input, as names and values."""
        skipped = f"{sum(self.skipped.values())} input rows"
        found = [
            ("duplicates", f"{self.duplicates} input rows"),
            ("skipped", f"{skipped}: {self.reasons}" if self.skipped else skipped),
        ]
        if self.truncated:
            longer = f"{self.truncated:,} samples longer than max_model_len - 1"
            found.append(("truncated", f"{longer}, {self.tokens_cut:,} tokens lost"))
        if self.ids_used_twice:
            found.append(("ids used twice", f"{self.ids_used_twice:,}; {self.shared_ids[0]}"))
        found += [("not read", f"{fields}, in {count:,} input rows") for fields, count in self.unread.items()]
        return found

    def require_samples(self, place: str) -> None:
        """Refuse to go on with nothing.

        Args:
            place: where the rows come from.

        Raises:
            NoSamples: says what to change.
        """
        if self.read == 0:
            raise NoSamples(f"{place} has no rows: name data with one JSON object a line, or a table with rows")
        if self.kept == 0:
            raise NoSamples(
                f"none of the {self.read:,} rows of {place} can be used ({self.reasons}); the first: "
                f"{self.problems[0]}; {LIST_ALL}"
            )
