"""What became of the rows of the data."""

from dataclasses import dataclass, field
from typing import Literal

from tasks.tokenize.errors import Problem

MAX_PROBLEMS = 100

Method = Literal["markers", "prefixes", "family"]
How = Literal[Method, "text", "given"]
"""How a loss mask came about: by a method of :mod:`tasks.tokenize.mask`, all of a text, or with the row."""


@dataclass
class TokenizeReport:
    """What became of the rows."""

    read: int = 0
    kept: int = 0
    """Samples in the table."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Rows without a sample, by reason."""
    truncated: int = 0
    split: int = 0
    """Rows that became several samples."""
    tokens: int = 0
    supervised_tokens: int = 0
    duplicates: int = 0
    """Samples with the same key as an earlier one."""
    ids_used_twice: int = 0
    """Source ids that stand for samples of different content."""
    methods: dict[How, int] = field(default_factory=dict)
    """Samples by how their loss mask came about."""
    counts: dict[str, int] = field(default_factory=dict)
    """Turns by role and tool calls in the table; and what is worth a note:

    * ``control_tokens_as_text``: rows whose text holds a control token, read as ordinary text.
    * ``reasoning_left_out``: turns whose reasoning the template does not write.
    * ``turns_without_end_token``: turns that the template does not end with a control token.
    * ``ends_inside_a_token``: turns whose first characters share a token with their header and are not supervised.
    """
    by_source: list[int] = field(default_factory=list)
    """Rows read from each source."""
    problems: list[Problem] = field(default_factory=list)
    """The first rows without a sample, at most :data:`MAX_PROBLEMS`."""
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0
