"""Whether a run may go on: nothing more is extracted when what comes out is wrong."""

import threading
from collections import Counter
from collections.abc import Sequence

from tasks.verify.config import Audit
from tasks.vocabulary import Verdict

SYSTEMATIC = 8
"""Once the gate is open, fewer failed samples of a chunk never stop a run."""
AT_FIRST = 2
"""While it is closed, one failed sample does not: the fault may be that sample's own."""


class Gate:
    """Closed until a chunk has shown that the engine computes what it should; may be used from several threads.

    While it is closed, chunks are extracted one after the other, and what fails is counted over all of them: a broken
    kernel is found by the first samples, before a disk is full of what it makes.
    """

    def __init__(self, audit: Audit) -> None:
        self.is_open = False
        self._share = audit.stop_share
        self._seen: list[Verdict] = []
        self._lock = threading.Lock()

    def judge(self, name: str, verdicts: Sequence[Verdict]) -> str | None:
        """Take the verdicts on a chunk; returns why the run should stop, or None.

        Args:
            name: of the chunk.
            verdicts: on its samples.
        """
        with self._lock:
            was_open = self.is_open
            if not was_open:
                self._seen += verdicts
                verdicts = list(self._seen)
            refused = _own_faults(verdicts)
            too_many = len(refused) > self._share * len(verdicts)
            if not was_open and any(verdict.accepted for verdict in verdicts) and not too_many:
                self.is_open = True
                self._seen.clear()
        if not too_many or len(refused) < (SYSTEMATIC if was_open else AT_FIRST):
            return None
        where = f"of {name}" if was_open else f"up to {name}, the first of this run,"
        reason, count = Counter(verdict.reason for verdict in refused).most_common(1)[0]
        example = next(verdict.detail for verdict in refused if verdict.reason == reason)
        return (
            f"{len(refused)} of {len(verdicts)} samples {where} were refused, {count} of them by {reason}: {example}; "
            "see the audit table"
        )


def _own_faults(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The samples that failed; a sample that began with rows of one that failed has that one's fault."""
    failed = {verdict.key for verdict in verdicts if not verdict.accepted}
    return [
        verdict
        for verdict in verdicts
        if not verdict.accepted and not any(failed & receipt.reused_from.keys() for receipt in verdict.receipts)
    ]
