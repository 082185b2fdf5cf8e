"""The judgement of samples with what only a whole run knows: the head to prove tokens with, and the usual sizes."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from tasks.model import Checkpoint, ModelError
from tasks.report.log import logger
from tasks.verify.bands import Bands
from tasks.verify.config import Audit
from tasks.verify.judge import Case, judge
from tasks.verify.proof import Head, has_last_depth, margin
from tasks.vocabulary import Identity, PlannedSample, Proof, Receipt, Verdict

SYSTEMATIC = 8
"""Fewer failed samples of a chunk never stop a run."""


class Examiner:
    """Judges the samples of one run; may be used from several threads."""

    def __init__(self, checkpoint: Checkpoint, identity: Identity, world_size: int, audit: Audit) -> None:
        self.identity = identity
        self.audit = audit
        self._checkpoint = checkpoint
        self._world_size = world_size
        self._bands = Bands(identity.depths)
        self._lock = threading.Lock()

    def examine(
        self,
        samples: Sequence[PlannedSample],
        receipts: Mapping[str, Sequence[Receipt]],
        ids_digests: Mapping[str, str],
    ) -> list[Verdict]:
        """Judge samples by the receipts of all ranks; those accepted widen what is known of usual sizes.

        Args:
            samples: what was planned.
            receipts: by key.
            ids_digests: by key, :func:`tasks.vocabulary.digest_ids` of the planned token ids.
        """
        proofs = self._prove(receipts)
        cases = {
            sample.key: Case(
                identity=self.identity,
                planned=sample,
                ids_digest=ids_digests[sample.key],
                world_size=self._world_size,
                receipts=receipts.get(sample.key, ()),
                audit=self.audit,
                proof=proofs.get(sample.key),
            )
            for sample in samples
        }
        verdicts = {key: judge(case) for key, case in cases.items()}
        # Usual is what samples are with which nothing else is wrong.
        sizes = {
            key: (case.planned.num_tokens, case.receipts[0].median_rms)
            for key, case in cases.items()
            if verdicts[key].accepted
        }
        outside = self._bands.judge(sizes)
        for key, (num_tokens, rms) in sizes.items():
            if key in outside:
                verdicts[key] = judge(replace(cases[key], outside=outside[key]))
            else:
                self._bands.learn(num_tokens, rms)
        return list(verdicts.values())

    def is_systematic(self, verdicts: Sequence[Verdict]) -> bool:
        """Whether so much of a chunk failed that going on would waste the machine.

        A sample that began with rows of another that failed does not count: it has that one's fault.
        """
        failed = {verdict.key for verdict in verdicts if not verdict.accepted}
        refused = sum(
            not verdict.accepted and not any(failed & receipt.reused_from.keys() for receipt in verdict.receipts)
            for verdict in verdicts
        )
        return refused >= SYSTEMATIC and refused > self.audit.stop_share * len(verdicts)

    def _prove(self, receipts: Mapping[str, Sequence[Receipt]]) -> dict[str, Proof]:
        rows = [r for of_sample in receipts.values() for r in of_sample if r.last_row and r.next_token is not None]
        if not rows or not has_last_depth(self.identity):
            return {}
        with self._lock:  # reading the head takes a while; the first chunk does, and others wait
            head = self._head
        if head is None:
            return {}
        states_NH = last_rows([r.last_row or b"" for r in rows], self.identity.dtype)
        proofs = head.prove(states_NH, [r.next_token or 0 for r in rows], margin(self.identity))
        return {receipt.key: proof for receipt, proof in zip(rows, proofs, strict=True)}

    @cached_property
    def _head(self) -> Head | None:
        try:
            return Head(self._checkpoint)
        except ModelError as error:
            logger.warning(f"the sampled tokens are not proved: {error}")
            return None


def last_rows(rows: Sequence[bytes], dtype: str) -> torch.Tensor:
    """Float32 [N, H] from the bits of rows in the states' element type."""
    if dtype == "float32":
        return torch.from_numpy(np.stack([np.frombuffer(row, dtype="<f4") for row in rows]))
    bits_NH = np.stack([np.frombuffer(row, dtype="<u2") for row in rows])
    return torch.from_numpy(bits_NH).view(torch.bfloat16).float()
