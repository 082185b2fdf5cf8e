"""Chunks of a budget of tokens, the same for the same input whatever the store holds."""

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import Chunk, PlannedSample, Verdict


def distinct(keys: Sequence[str], num_tokens: npt.NDArray[np.int32]) -> list[PlannedSample]:
    """The distinct samples of a table in the order of their first rows; rows with equal keys are duplicates."""
    rows: dict[str, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    return [PlannedSample(key, int(num_tokens[of_key[0]]), tuple(of_key)) for key, of_key in rows.items()]


def split(samples: Sequence[PlannedSample], chunk_tokens: int, *, in_order: bool = False) -> list[Chunk]:
    """Cut the samples, in the order given, into chunks of at most ``chunk_tokens`` tokens.

    A sample longer than that gets a chunk of its own. Inside a chunk the longest sample comes first, so that a
    step's remainder is filled by short ones, unless they are to stay ``in_order``. In the second half of a chunk, the
    border comes where samples share the least with those before. A chunk is named by its place and content:
    appending to the input leaves the chunks before unchanged.
    """
    chunks: list[Chunk] = []
    group: list[PlannedSample] = []
    tokens = 0
    for sample in samples:
        while group and tokens + sample.num_tokens > chunk_tokens:
            border = _border([*group, sample], chunk_tokens // 2)
            chunks.append(_chunk(len(chunks), group[:border], in_order))
            group = group[border:]
            tokens = sum(s.num_tokens for s in group)
        group.append(sample)
        tokens += sample.num_tokens
    if group:
        chunks.append(_chunk(len(chunks), group, in_order))
    return chunks


def _border(samples: Sequence[PlannedSample], least_tokens: int) -> int:
    """Where the second part begins, so that it shares least with the first, which has so many tokens or all but one."""
    best, tokens = len(samples) - 1, sum(s.num_tokens for s in samples[:-1])
    for place in range(len(samples) - 2, 0, -1):
        tokens -= samples[place].num_tokens
        if tokens < least_tokens:
            break
        if samples[place].like_previous < samples[best].like_previous:
            best = place
    return best


def _chunk(index: int, samples: list[PlannedSample], in_order: bool) -> Chunk:
    ordered = samples if in_order else sorted(samples, key=lambda s: (-s.num_tokens, s.key))
    content = hashlib.sha256("".join(s.key for s in ordered).encode()).hexdigest()
    return Chunk(f"chunk-{index:04d}-{content[:6]}", tuple(ordered))


def retries(chunks: Sequence[Chunk], refused: Sequence[Verdict], limit: int) -> list[tuple[Chunk, Verdict]]:
    """A chunk of its own for each sample that was refused; none if more were refused than ``limit``."""
    if len(refused) > limit:
        return []
    planned = {sample.key: sample for chunk in chunks for sample in chunk.missing}
    return [
        (Chunk(f"retry-{verdict.key[:12]}", (planned[verdict.key],), (planned[verdict.key],)), verdict)
        for verdict in refused
    ]
