"""Digests of hidden states that can be computed where the states are: on a GPU, on a CPU, from disk.

A row (one token at one depth) is digested by a multilinear hash over its bits: every column has an odd 64-bit
weight of its own, so that swapped columns, another value or another sign change the sum. A sample's digest at one
depth is sha256 over its rows' digests in token order, so that swapped, shifted or repeated rows change it too.
Two ranks, or a device and a disk, hold the same states exactly when the digests are equal.
"""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_SEED = 0x1A7E27A9
_ROWS_AT_ONCE = 2048  # bounds the 64-bit intermediate: 2048 rows of 7168 columns are 117 MB


@lru_cache(maxsize=8)
def column_weights(columns: int, device: torch.device) -> torch.Tensor:
    """Odd int64 weights [columns], the same everywhere."""
    generator = np.random.Generator(np.random.Philox(key=_SEED))
    weights = generator.integers(0, 2**63, size=columns, dtype=np.int64) | 1
    return torch.from_numpy(weights).to(device)


def row_digests(rows_NH: torch.Tensor) -> torch.Tensor:
    """Digest each row's bits, on the device that holds them.

    Args:
        rows_NH: bfloat16 or float32 [N, H], or its bits as an integer tensor of the same width.

    Returns:
        int64 [N]
    """
    bits_NH = rows_NH.view(torch.int16 if rows_NH.element_size() == 2 else torch.int32)
    weights_H = column_weights(bits_NH.shape[1], bits_NH.device)
    digests_N = torch.empty(bits_NH.shape[0], dtype=torch.int64, device=bits_NH.device)
    for start in range(0, bits_NH.shape[0], _ROWS_AT_ONCE):
        block = bits_NH[start : start + _ROWS_AT_ONCE]
        digests_N[start : start + _ROWS_AT_ONCE] = (block.to(torch.int64) * weights_H).sum(dim=1)
    return digests_N


def sample_digest(row_digests_T: npt.NDArray[np.int64]) -> str:
    """Combine the digests of one sample's rows at one depth, in token order, into 32 hex digits."""
    return hashlib.sha256(np.ascontiguousarray(row_digests_T, dtype="<i8").tobytes()).hexdigest()[:32]


def differing_rows(digests_TL: Sequence[npt.NDArray[np.int64]]) -> npt.NDArray[np.bool_]:
    """Where several holders of one sample disagree; bool [T, L]."""
    first, *others = digests_TL
    differ_TL = np.zeros(first.shape, dtype=np.bool_)
    for other in others:
        differ_TL |= other != first
    return differ_TL


def repeated_rows(digests_T: npt.NDArray[np.int64], input_ids_T: npt.NDArray[np.int32]) -> int:
    """Rows of one depth that are equal bit for bit to the row of another token.

    Equal tokens may give equal rows: the embedding does, and so does a run of one token from the beginning.
    """
    order = np.lexsort((input_ids_T, digests_T))
    digests, ids = digests_T[order], input_ids_T[order]
    return int(((digests[1:] == digests[:-1]) & (ids[1:] != ids[:-1])).sum())
