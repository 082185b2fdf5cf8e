"""Digests of hidden states that can be computed where the states are: on a GPU, on a CPU, from disk.

A row (one token at one depth) is digested by two multilinear hashes over its bits, each modulo 2^32: every column has
an odd weight of its own in each, so that any one other value changes both, and swapped columns do too. The bits are
taken 16 at a time: a factor of 2^31, which the sign of a float32 would have, keeps only the parity of the weights,
and with all signs of a row changed nothing would show. A sample's digest at one
depth is sha256 over its rows' digests in token order, so that swapped, shifted or repeated rows change it too.
Two ranks, or a device and a disk, hold the same states exactly when the digests are equal.
"""

import hashlib
import threading
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_SEED = 0x1A7E27A9
_ROWS_AT_ONCE = 128  # bounds the intermediate to what a CPU's cache holds
_scratch = threading.local()


@lru_cache(maxsize=8)
def column_weights(columns: int, device: torch.device) -> torch.Tensor:
    """Odd int32 weights [2, columns], the same everywhere."""
    generator = np.random.Generator(np.random.Philox(key=_SEED))
    weights = generator.integers(-(2**31), 2**31, size=(2, columns), dtype=np.int32) | 1
    return torch.from_numpy(weights).to(device)


def row_digests(rows_NH: torch.Tensor) -> torch.Tensor:
    """Digest each row's bits in host memory; :mod:`tasks.extract.row_kernel` does the same on a GPU.

    Args:
        rows_NH: bfloat16 or float32 [N, H], or its bits as an integer tensor of the same width.

    Returns:
        int64 [N], the first hash in the upper half and the second in the lower
    """
    return torch.from_numpy(bit_digests(rows_NH.view(torch.int16).numpy()))


def bit_digests(bits_NW: npt.NDArray[np.int16]) -> npt.NDArray[np.int64]:
    """The same of rows as their bits, int16 [N, W]: two of each element of float32, the lower half first."""
    num_rows, columns = bits_NW.shape
    if getattr(_scratch, "columns", None) != columns:
        # Written over and over: memory fresh from the system costs more than the arithmetic.
        with torch.inference_mode(False):  # to be used in either mode
            _scratch.columns, _scratch.wide = columns, torch.empty(_ROWS_AT_ONCE, columns, dtype=torch.int32)
            _scratch.halves = torch.empty(2, _ROWS_AT_ONCE, dtype=torch.int32)
    wide_RW, halves_2R = _scratch.wide.numpy(), _scratch.halves.numpy()
    turned_WR, weights_2W = _scratch.wide.T, column_weights(columns, torch.device("cpu"))
    digests_N = np.empty(num_rows, np.int64)
    # Two calls a turn that give up the interpreter's lock, for which a dozen writer threads would wait longer than they
    # compute. The last turn digests what is left of the one before, too.
    for start in range(0, num_rows, _ROWS_AT_ONCE):
        block = slice(start, min(start + _ROWS_AT_ONCE, num_rows))
        size = block.stop - start
        np.copyto(wide_RW[:size], bits_NW[block])
        torch.mm(weights_2W, turned_WR, out=_scratch.halves)  # modulo 2^32, as int32 wraps
        digests_N[block] = (halves_2R[0, :size].astype(np.int64) << 32) | halves_2R[1, :size].view(np.uint32)
    return digests_N


def pack(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Two int32 tensors as the halves of one of int64."""
    return (first.to(torch.int64) << 32) | (second.to(torch.int64) & 0xFFFFFFFF)


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
    ascending = np.sort(digests_T)  # of all rows but those of embeddings, no two are alike
    if not (ascending[1:] == ascending[:-1]).any():
        return 0
    order = np.lexsort((input_ids_T, digests_T))
    digests, ids = digests_T[order], input_ids_T[order]
    return int(((digests[1:] == digests[:-1]) & (ids[1:] != ids[:-1])).sum())
