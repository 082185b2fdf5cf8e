"""What can go wrong between a user's data and a table of samples."""

from dataclasses import dataclass


class TokenizeError(Exception):
    """The data cannot be tokenized as configured; nothing of the run's result is usable."""


class SourceError(TokenizeError):
    """A source cannot be read: it is missing, damaged or of an unknown format."""


class NoSamples(TokenizeError):
    """No row of the data gives a sample."""


class TokenizerError(TokenizeError):
    """The checkpoint's tokenizer or chat template cannot be used."""


class BadRow(Exception):
    """One row is wrong; the others are not touched.

    ``reason`` is a short name to count by; the message says in full what is wrong.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Problem:
    """A row that gave no sample."""

    file: str
    number: int
    """Line number in a JSONL file, row number elsewhere; the first is 1."""
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.file}:{self.number}: {self.detail} [{self.reason}]"


class BadRowError(TokenizeError):
    """A row is wrong and the configuration says to stop at the first."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(f"{problem} (on_error: fail)")
        self.problem = problem
