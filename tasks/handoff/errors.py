"""Errors of the hand-off; each message says what to change."""


class HandoffError(ValueError):
    """The store cannot be written in this format, or the files cannot become a store."""


class UnreadableSample(ValueError):
    """A file does not hold a sample of the format; carries the short name of the reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.detail = detail
