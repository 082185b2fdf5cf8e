"""The gather over ranks: who holds which rows, who disagrees with the others, and by how much.

Every rank digests what it holds. Where the residual stream is replicated all digests must be equal; where rows are
shared out, the ranks' ranges must cover every token exactly once. All of it works for any number of ranks.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.digest import differing_rows
from tasks.vocabulary import Receipt


def coverage(ranges: Iterable[tuple[int, int]], num_tokens: int) -> str | None:
    """What is wrong with token ranges [start, stop) that should cover [0, num_tokens) exactly once; None if nothing."""
    position = 0
    for start, stop in sorted(ranges):
        if start >= stop:
            return f"the range [{start}, {stop}) holds no row"
        if start > position:
            return f"rows [{position}, {start}) are on no rank"
        if start < position:
            return f"rows [{start}, {min(stop, position)}) are on more than one rank"
        position = stop
    if position < num_tokens:
        return f"rows [{position}, {num_tokens}) are on no rank"
    return f"rows [{num_tokens}, {position}) lie behind the sample" if position > num_tokens else None


def odd_ranks(receipts: Sequence[Receipt]) -> list[int]:
    """Ranks that disagree with the majority.

    Without a majority (of two ranks there never is one), those that convict themselves: rows that differ from what
    their own layers were given, that are all zero, or that are NaN where deeper ones are not. Empty if neither tells.
    """
    counts = Counter(receipt.digests for receipt in receipts)
    (digests, most), *others = counts.most_common()
    if others and most > others[0][1]:
        return [r.rank for r in receipts if r.digests != digests]
    guilty = [r.rank for r in receipts if any((*(r.unlike_rows or ()), *r.zero_rows, *r.healed_rows))]
    return guilty if len(guilty) < len(receipts) else []


@dataclass(frozen=True)
class Difference:
    """How a sample differs between two ranks at one depth."""

    depth: int
    ranks: tuple[int, int]
    first_row: int
    num_rows: int
    max_abs: float | None
    """Largest absolute difference of an element, over the rows whose values were fetched; None if none were."""
    cosine: float | None
    """Smallest cosine between two ranks' versions of a row, over the same rows."""

    def __str__(self) -> str:
        text = f"r_{self.depth} of ranks {self.ranks[0]} and {self.ranks[1]}: {self.num_rows} rows from row "
        text += str(self.first_row)
        if self.max_abs is not None:
            text += f", max abs {self.max_abs:.3g}, cosine {self.cosine:.6f}"
        return text


def differences(receipts: Sequence[Receipt], depths: Sequence[int]) -> list[Difference]:
    """Compare each odd rank (or the second) with another one, by the row evidence that was fetched."""
    if any(r.evidence is None for r in receipts):
        return []
    odd = odd_ranks(receipts)
    reference = next(r for r in receipts if r.rank not in odd)
    others = [r for r in receipts if r.rank in odd] or [
        next(r for r in receipts if r.digests != reference.digests),
    ]
    found = []
    for other in others:
        ours_TL, theirs_TL = (_row_digests(r, len(depths)) for r in (reference, other))
        differ_TL = differing_rows([ours_TL, theirs_TL])
        values = [_values(r, len(depths)) for r in (reference, other)]
        for d, depth in enumerate(depths):
            rows = np.flatnonzero(differ_TL[:, d])
            if not len(rows):
                continue
            max_abs = cosine = None
            ours_LnH, theirs_LnH = values
            if ours_LnH is not None and theirs_LnH is not None:
                max_abs, cosine = compare(ours_LnH[d], theirs_LnH[d])
            found.append(
                Difference(depth, (reference.rank, other.rank), int(rows[0]), len(rows), max_abs, cosine),
            )
    return found


def compare(ours_nH: npt.NDArray[np.float32], theirs_nH: npt.NDArray[np.float32]) -> tuple[float, float]:
    """Largest absolute difference of an element, and the smallest cosine between two versions of a row."""
    ours, theirs = ours_nH.astype(np.float64), theirs_nH.astype(np.float64)
    norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    products = (ours * theirs).sum(axis=1)
    both_zero = ~(ours.any(axis=1) | theirs.any(axis=1))
    cosines = np.where(both_zero, 1.0, products / np.where(norms > 0, norms, 1.0))
    return float(np.abs(ours - theirs).max()), float(cosines.min())


def _row_digests(receipt: Receipt, num_depths: int) -> npt.NDArray[np.int64]:
    assert receipt.evidence is not None
    return np.frombuffer(receipt.evidence.digests, dtype="<i8").reshape(-1, num_depths)


def _values(receipt: Receipt, num_depths: int) -> npt.NDArray[np.float32] | None:
    evidence = receipt.evidence
    if evidence is None or evidence.values is None:
        return None
    return np.frombuffer(evidence.values, dtype="<f4").reshape(num_depths, len(evidence.rows), -1)
