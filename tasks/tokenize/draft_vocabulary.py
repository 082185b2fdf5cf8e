"""The reduced vocabulary of an EAGLE-3 draft model: the tokens that are supervised most often.

Letters in shapes: T tokens of one sample, V target vocabulary, D draft vocabulary.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """Which tokens of the target model the draft model knows, and under which ids."""

    d2t: npt.NDArray[np.int64]
    """[D], offset of each draft id: it stands for target id ``i + d2t[i]``."""
    t2d: npt.NDArray[np.bool_]
    """[V], whether the draft model knows the target id; in ascending order these are the draft ids."""
    coverage: float
    """Share of the supervised tokens that the draft model knows."""

    @property
    def target_ids(self) -> npt.NDArray[np.int64]:
        """[D], the target id of each draft id, ascending."""
        return np.arange(len(self.d2t)) + self.d2t


def count_tokens(
    samples: Iterable[tuple[npt.NDArray[np.integer], npt.NDArray[np.bool_]]], vocab_size: int
) -> npt.NDArray[np.int64]:
    """[V], how often each token is supervised.

    Args:
        samples: token ids [T] and loss mask [T] of each sample, each distinct sample once.
        vocab_size: V.

    Raises:
        ValueError: an id is outside the vocabulary, or a mask has another length than its ids.
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for input_ids, loss_mask in samples:
        if len(input_ids) != len(loss_mask):
            raise ValueError(f"a loss mask of {len(loss_mask)} entries for {len(input_ids)} tokens")
        supervised = input_ids[loss_mask.astype(np.bool_)]
        if len(supervised) and not 0 <= supervised.min() <= supervised.max() < vocab_size:
            raise ValueError(f"token ids from {supervised.min()} to {supervised.max()} in a vocabulary of {vocab_size}")
        counts += np.bincount(supervised, minlength=vocab_size)
    return counts


def draft_vocabulary(counts: npt.NDArray[np.int64], size: int) -> DraftVocabulary:
    """The ``size`` most frequent tokens; of equally frequent ones, those with the lower ids.

    Args:
        counts: [V], as from :func:`count_tokens`.
        size: D.

    Raises:
        ValueError: no token is supervised, or D is not between 1 and V.
    """
    if not 1 <= size <= len(counts):
        raise ValueError(f"a draft vocabulary of {size} tokens out of {len(counts)}")
    total = int(counts.sum())
    if total == 0:
        raise ValueError("no sample has a supervised token, so there is nothing to choose a draft vocabulary by")
    chosen = np.sort(np.argsort(-counts, kind="stable")[:size])
    t2d = np.zeros(len(counts), dtype=np.bool_)
    t2d[chosen] = True
    return DraftVocabulary(chosen - np.arange(size), t2d, float(counts[chosen].sum() / total))
