"""Samples that begin alike, next to each other: what one has computed, the next can use while it is at hand."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

import numpy as np
import numpy.typing as npt

from tasks.prefixes import prefix_names
from tasks.vocabulary import Chunk, PlannedSample

BLOCK = 64
"""Tokens by which prefixes are compared. The blocks of vLLM's KV cache are 16 to 128 tokens; only the order of the
samples and what is held for others depend on this number, never what is taken from where."""

WORTHWHILE = 0.1
"""Least share of known tokens at which prefixes are reused without being asked for. Plain chats share 1 to 7 %, tool
use two thirds; to hold and to look up rows costs far less than a tenth of computing them."""


def arrange(
    samples: Sequence[PlannedSample], ids_of: Callable[[PlannedSample], npt.NDArray[np.int32]]
) -> list[PlannedSample]:
    """Put samples that share a prefix next to each other, the more they share the closer.

    Families and their branches come in the order in which the input first has them. Each sample is told how much it
    shares: ``like_previous`` and ``shared``.
    """
    first: dict[bytes, int] = {}
    # A sample's place in the tree of prefixes: at each block, the first sample that begins with all tokens up to there.
    paths = [
        [first.setdefault(name, index) for name in prefix_names(ids_of(sample), BLOCK)]
        for index, sample in enumerate(samples)
    ]
    order = sorted(range(len(samples)), key=lambda index: (*paths[index], index))
    alike = [0, *(_common(paths[a], paths[b]) for a, b in pairwise(order)), 0]
    return [
        replace(
            samples[index],
            like_previous=alike[place] * BLOCK,
            # One block more: samples that part inside of it share its beginning, wherever they stand.
            shared=min(samples[index].num_tokens, (max(alike[place], alike[place + 1]) + 1) * BLOCK),
        )
        for place, index in enumerate(order)
    ]


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def known_share(chunks: Sequence[Chunk]) -> float:
    """Share of the missing samples' tokens, in whole blocks, that a missing sample before has begun with, too."""
    known = total = 0
    alike: float = 0.0  # with the last missing sample
    for chunk in chunks:
        missing = {sample.key for sample in chunk.missing}
        for sample in chunk.samples:
            alike = min(alike, sample.like_previous)
            if sample.key in missing:
                known += int(alike)
                total += sample.num_tokens
                alike = math.inf
    return known / total if total else 0.0


def reuses_prefixes(chunks: Sequence[Chunk]) -> bool:
    """Whether the plan's samples were arranged for their prefixes to be reused."""
    return any(sample.shared for chunk in chunks for sample in chunk.missing)
