"""The audit of a store: every stored byte, every recorded digest, and what the values themselves say.

It needs the store and the model's checkpoint, and no engine. What the checks at extraction time had seen is not
trusted: digests are computed again from the disk, tokens are proved again from r_L, and the store's samples are
compared with each other.
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks import digest
from tasks.model import Checkpoint
from tasks.profile import profile_of
from tasks.store.errors import DamagedSample
from tasks.store.reader import Reader, StoredSample
from tasks.verify.bands import Bands
from tasks.verify.parity import TOLERANCES, Parity, Tolerance, compare
from tasks.verify.proof import Head, has_last_depth, margin
from tasks.vocabulary import Identity, Outcome, Profile, Proof

SHIFTS = (-2, -1, 0, 1, 2)
POSITIONS = 256
"""Rows of a sample whose next token is predicted, spread evenly over it."""

#: Recomputes states: (key, ids [T]) -> float32 [L, T, H]
Recompute = Callable[[str, npt.NDArray[np.int32]], torch.Tensor]


class AuditError(ValueError):
    """The audit cannot be made as asked for; the message says what to change."""


@dataclass(frozen=True)
class Problem:
    """What is wrong with a sample."""

    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}"


@dataclass
class Audited:
    """What the audit found of one sample."""

    key: str
    sources: tuple[str, ...]
    num_tokens: int
    shape: tuple[int, ...] = ()
    dtype: str = ""
    rms: tuple[float, ...] = ()
    median_rms: tuple[float, ...] = ()
    finite: bool | None = None
    ranks: int | None = None
    """Ranks that had agreed when it was extracted."""
    reused: Mapping[str, int] = field(default_factory=dict)
    """Key of another sample -> rows that were computed for it, when this one was extracted."""
    proof: Proof | None = None
    hits: Mapping[int, int] = field(default_factory=dict)
    """Shift s -> rows t whose most likely next token is the token at t + 1 + s; 0 is right."""
    predicted: int = 0
    """Rows that were asked."""
    parity: tuple[Parity, ...] = ()
    profile: Profile | None = None
    problems: list[Problem] = field(default_factory=list)


@dataclass
class AuditReport:
    """What the audit found of a store."""

    store: str
    identity: Identity
    samples: list[Audited]
    quarantined: list[dict[str, Any]]
    proof_note: str = ""
    """Why no token was proved, where none was."""
    reference: str | None = None
    tolerance: Tolerance | None = None
    store_problems: list[str] = field(default_factory=list)
    """What is wrong with the store's files outside of the samples, or with the store as a whole."""

    @property
    def failed(self) -> list[Audited]:
        return [sample for sample in self.samples if sample.problems]

    @property
    def passed(self) -> bool:
        """Whether the store has samples, and nothing is wrong with any of them or with the files beside them."""
        return bool(self.samples) and not self.failed and not self.store_problems

    def proofs(self, outcome: Outcome) -> int:
        return sum(s.proof is not None and s.proof.outcome == outcome for s in self.samples)

    def accuracy(self, shift: int = 0) -> float | None:
        """Share of rows whose most likely next token is the sample's own (shifted by ``shift``)."""
        predicted = sum(sample.predicted for sample in self.samples)
        return sum(sample.hits.get(shift, 0) for sample in self.samples) / predicted if predicted else None

    @property
    def rows_predicted(self) -> int:
        return sum(sample.predicted for sample in self.samples)

    def worst(self, depth: int) -> Parity | None:
        """The sample furthest from the reference at a depth."""
        found = [p for sample in self.samples for p in sample.parity if p.depth == depth]
        return max(found, key=lambda p: p.worst_error, default=None)


def open_head(checkpoint: Checkpoint, identity: Identity) -> Head | None:
    """The checkpoint's head to prove tokens with; None where the store lacks r_L.

    Raises:
        AuditError: the checkpoint is not the one that filled the store.
    """
    if checkpoint.fingerprint != identity.model:
        raise AuditError(
            f"the store was filled from a checkpoint with fingerprint {identity.model}, but {checkpoint.path} has "
            f"{checkpoint.fingerprint}; name the right one with --model"
        )
    if not has_last_depth(identity):
        return None
    return Head(checkpoint, "cuda" if torch.cuda.is_available() else "cpu")


def audit(
    reader: Reader,
    head: Head | None,
    *,
    samples: int | None = None,
    reference: str | None = None,
    recompute: Recompute | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> AuditReport:
    """Audit a store.

    Args:
        reader: of the store.
        head: proves the sampled tokens; None leaves that out.
        samples: how many to compare with the reference, chosen at random (the same ones each time).
        reference: its name.
        recompute: the reference.
        progress: called with the number of samples done, and their number.
    """
    identity = reader.identity
    tolerance = TOLERANCES[identity.dtype if identity.stored_as == "exact" else identity.stored_as]
    report = AuditReport(reader.url, identity, [], list(reader.quarantined()), reference=reference)
    report.store_problems += reader.store_problems()
    if not len(reader):
        report.store_problems.append("it has no samples, so nothing was proved")
    if head is None:
        report.proof_note = f"the store has no r_{identity.num_layers}"
    if recompute is not None:
        report.tolerance = tolerance
    owners = _owners(reader)
    chosen = _choose(reader, samples or len(reader)) if recompute is not None else set()
    for number, key in enumerate(reader.keys, 1):
        found, stored = _read(reader, key)
        if stored is not None:
            _check_values(found, stored, reader, owners, head)
            if recompute is not None and key in chosen:
                _check_parity(found, stored, recompute(key, stored.input_ids_T), tolerance, reference or "")
        report.samples.append(found)
        progress(number, len(reader))
    _check_sizes(report)
    return report


def _choose(reader: Reader, number: int) -> set[str]:
    """Keys at random, the same each time; half of them with rows that were computed for other samples, if there are."""
    keys = list(reader.keys)
    random.Random(0).shuffle(keys)
    if number >= len(keys):
        return set(keys)
    reused = []
    for key in keys:
        with suppress(DamagedSample):
            if reader.record(key).capture.get("reused"):
                reused.append(key)
    return set([*reused[: (number + 1) // 2], *(key for key in keys if key not in reused)][:number])


def _owners(reader: Reader) -> dict[str, tuple[str, int]]:
    """Digest recorded at extraction -> (key, depth)."""
    owners = {}
    for key in reader.keys:
        try:
            recorded = reader.record(key).capture.get("digests", ())
        except DamagedSample:
            continue
        owners.update({each: (key, depth) for depth, each in zip(reader.identity.depths, recorded, strict=False)})
    return owners


def _read(reader: Reader, key: str) -> tuple[Audited, StoredSample | None]:
    found = Audited(key, reader.sources_of(key), reader.num_tokens(key))
    try:
        stored = reader.read(key)
        capture = reader.record(key).capture
        found.ranks, found.reused = capture.get("ranks"), capture.get("reused", {})
    except DamagedSample as error:
        found.problems.append(Problem("damaged", error.problem))
        return found, None
    return found, stored


def _check_values(
    found: Audited, stored: StoredSample, reader: Reader, owners: Mapping[str, tuple[str, int]], head: Head | None
) -> None:
    identity, problem = reader.identity, found.problems.append
    states_LTH = stored.hidden_states
    found.shape, found.dtype = tuple(states_LTH.shape), stored.dtype
    if found.shape != identity.shape(stored.num_tokens):
        problem(Problem("shape", f"{list(found.shape)}, expected {list(identity.shape(stored.num_tokens))}"))
        return
    if identity.key(stored.input_ids_T) != found.key:
        problem(Problem("token_ids", "the stored token ids are not those that the key stands for"))
    rows_TL = np.stack([digest.row_digests(rows_TH).numpy() for rows_TH in states_LTH], axis=1)
    if identity.stored_as == "exact":
        recorded = reader.record(found.key).capture.get("digests")
        if recorded is not None:
            _check_digests(found, identity, [digest.sample_digest(d_T) for d_T in rows_TL.T], recorded, owners)
    values_LTH = states_LTH.float()
    rms_TL = values_LTH.double().square().mean(dim=2).sqrt().T.numpy()
    found.rms = tuple(float(x) for x in np.sqrt(np.square(rms_TL).mean(axis=0)))
    found.median_rms = tuple(float(x) for x in np.median(rms_TL, axis=0))
    found.finite = bool(torch.isfinite(values_LTH).all())
    found.profile = profile_of(rms_TL)
    _check_rows(found, identity, rms_TL, rows_TL, stored.input_ids_T)
    if head is not None and found.finite:
        _check_tokens(found, stored, values_LTH[-1], head, identity)


def _check_digests(
    found: Audited,
    identity: Identity,
    computed: Sequence[str],
    recorded: Sequence[str],
    owners: Mapping[str, tuple[str, int]],
) -> None:
    wrong = [depth for d, depth in enumerate(identity.depths) if computed[d] != recorded[d]]
    if not wrong:
        return
    notes = []
    for d, depth in enumerate(identity.depths):
        owner = owners.get(computed[d])
        if computed[d] != recorded[d] and owner is not None:
            whose = "this sample" if owner[0] == found.key else f"sample {owner[0][:12]}"
            notes.append(f"r_{depth} holds what r_{owner[1]} of {whose} was")
    note = f" ({'; '.join(notes)})" if notes else ""
    found.problems.append(
        Problem("digest", f"states at depths {wrong} are not those that the ranks agreed on at extraction{note}")
    )


def _check_rows(
    found: Audited,
    identity: Identity,
    rms_TL: npt.NDArray[np.float64],
    rows_TL: npt.NDArray[np.int64],
    input_ids_T: npt.NDArray[np.int32],
) -> None:
    depths = identity.depths
    repeated_L = [digest.repeated_rows(digests_T, input_ids_T) for digests_T in rows_TL.T]
    carried = (rows_TL[:, 1:] == rows_TL[:, :-1]).sum(axis=0)
    for reason, counts in {
        "finite": (~np.isfinite(rms_TL)).sum(axis=0),
        "zero_rows": (rms_TL == 0).sum(axis=0),
        "repeated_rows": repeated_L if identity.stored_as == "exact" else [],
        "distinct_depths": (0, *carried) if identity.stored_as == "exact" else [],
    }.items():
        by_depth = {depth: int(n) for depth, n in zip(depths, counts, strict=False) if n}
        if by_depth:
            found.problems.append(Problem(reason, f"rows by depth: {by_depth}"))


def _check_tokens(found: Audited, stored: StoredSample, last_TH: torch.Tensor, head: Head, identity: Identity) -> None:
    predicted = predict(
        head, last_TH, stored.input_ids_T, stored.next_token, margin(identity), normed=identity.last_is_normed
    )
    found.predicted, found.hits = predicted.rows, predicted.hits
    if stored.next_token is not None:
        found.proof = last = predicted.last
        if last.outcome == "failed":
            found.problems.append(
                Problem(
                    "next_token",
                    f"the last row gives token {last.computed}, the engine sampled {last.sampled}, whose logit is "
                    f"{last.gap:.3g} lower (near ties end at {last.margin:.3g})",
                )
            )
    if predicted.shift:
        found.problems.append(Problem("shifted", predicted.describe_shift()))


@dataclass(frozen=True)
class Predicted:
    """What the rows of one sample's last state predict."""

    rows: int
    """Rows that were asked; the last row is not among them."""
    hits: Mapping[int, int]
    """Shift s -> rows t whose most likely next token is the token at t + 1 + s; 0 is right."""
    last: Proof
    """Of the last row."""

    @property
    def shift(self) -> int:
        """The shift that explains clearly more rows than none does, else 0."""
        best = max(self.hits, key=lambda shift: self.hits[shift], default=0)
        return best if best and clearly_more(self.hits[best], self.hits[0]) else 0

    def describe_shift(self) -> str:
        return (
            f"rows predict the token {1 + self.shift} ahead instead of the next: {self.hits[self.shift]} of "
            f"{self.rows} rows do, {self.hits[0]} the next"
        )


def clearly_more(hits: int, others: int) -> bool:
    """Whether so many more rows hit that chance does not explain it."""
    return hits > others + max(4.0, 3 * math.sqrt(hits))


def predict(
    head: Head,
    last_TH: torch.Tensor,
    ids_T: npt.NDArray[np.int32],
    next_token: int | None,
    limit: float,
    *,
    normed: bool = False,
) -> Predicted:
    """Ask rows of a sample for their next token, and see how far ahead it stands.

    Args:
        head: of the model.
        last_TH: [T, H] r_L.
        ids_T: the sample's tokens.
        next_token: what the engine sampled after the sample, where that is known.
        limit: see :data:`tasks.verify.proof.MARGIN`.
        normed: the states went through the final norm already.
    """
    num_tokens = len(ids_T)
    positions = np.unique(np.linspace(0, num_tokens - 2, min(num_tokens - 1, POSITIONS)).astype(int))
    following = [*ids_T[positions + 1].tolist(), -1 if next_token is None else next_token]
    *proofs, last = head.prove(last_TH[[*positions, num_tokens - 1]], following, limit, normed=normed)
    tokens = np.array([proof.computed for proof in proofs], dtype=np.int64)
    hits = {shift: _hits(tokens, positions, ids_T, shift) for shift in SHIFTS} if len(positions) else {}
    return Predicted(len(positions), hits, last)


def _hits(
    tokens: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], ids_T: npt.NDArray[np.int32], shift: int
) -> int:
    ahead = positions + 1 + shift
    inside = (ahead >= 0) & (ahead < len(ids_T))
    return int((tokens[inside] == ids_T[ahead[inside]]).sum())


def _check_parity(
    found: Audited, stored: StoredSample, reference_LTH: torch.Tensor, tolerance: Tolerance, name: str
) -> None:
    pairs = zip(stored.hidden_states.float(), reference_LTH.float(), stored.depths, strict=True)
    found.parity = tuple(compare(stored_TH, reference_TH, depth) for stored_TH, reference_TH, depth in pairs)
    far = [str(parity) for parity in found.parity if not parity.within(tolerance)]
    if far:
        found.problems.append(Problem("reference", f"far from {name}: {'; '.join(far)}"))


def _check_sizes(report: AuditReport) -> None:
    sizes = {s.key: (s.num_tokens, s.median_rms) for s in report.samples if s.median_rms}
    outside = Bands(report.identity.depths).judge(sizes)
    for sample in report.samples:
        sample.problems += [Problem("usual_size", str(each)) for each in outside.get(sample.key, ())]
