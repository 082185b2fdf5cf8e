"""Copies of rows within host memory, by several threads.

One core copies 3 to 5 GB/s. That is enough for rows that are copied once, into their sample. Rows of shared prefixes
are copied into what is held for others as well, and from there into each sample that begins with them: with MLA on two
GPUs some 5 GB/s a rank.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

#: Where to and from, of one shape [..., N, H].
Copy = tuple[torch.Tensor, torch.Tensor]

_PIECE_BYTES = 4 << 20  # of one thread at a time


class Copies:
    """Runs copies that do not overlap, and returns when all are made."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="layertap-copier") if threads > 1 else None

    def run(self, copies: Sequence[Copy]) -> None:
        if self._pool is None or sum(there.nbytes for there, _ in copies) <= _PIECE_BYTES:
            _copy_all(copies)
            return
        pieces = [piece for copy in copies for piece in _pieces(*copy)]
        # Handed out at once: to hand over each piece would take as long as to copy a megabyte.
        for _ in self._pool.map(_copy_all, [pieces[i :: self._threads] for i in range(self._threads)]):
            pass

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _copy_all(copies: Sequence[Copy]) -> None:
    for there, here in copies:
        there.copy_(here)  # without the GIL


def _pieces(there: torch.Tensor, here: torch.Tensor) -> list[Copy]:
    num_rows = there.shape[-2]
    rows = max(1, _PIECE_BYTES * num_rows // max(1, there.nbytes))
    return [(there[..., i : i + rows, :], here[..., i : i + rows, :]) for i in range(0, num_rows, rows)]
