"""Copies of rows within host memory, by several threads.

One core copies 3 to 5 GB/s. That is enough for rows that are copied once, into their sample. Rows of shared prefixes
are copied into what is held for others as well, and from there into samples that begin with them: with MLA on two GPUs
some 5 GB/s a rank.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

#: Where to and from, uint8 of one shape [..., N, B].
Copy = tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]

# Of one thread at a time. After each the thread waits for the interpreter's lock, with those that encode.
_PIECE_BYTES = 16 << 20


class Copies:
    """Runs copies that do not overlap, and returns when all are made."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="layertap-copier") if threads > 1 else None

    def run(self, copies: Sequence[Copy]) -> None:
        """Make copies."""
        if self._pool is None or sum(there.nbytes for there, _ in copies) <= _PIECE_BYTES:
            _copy_all(copies)
        else:
            self._share(_copy_all, [piece for copy in copies for piece in _pieces(*copy)])

    def mark(self, rows: Sequence[npt.NDArray[np.uint8]], num_bytes: int, value: int) -> None:
        """Set the first bytes of rows, arrays [..., N, B]; it is what first touches their memory."""

        def mark_all(some: Sequence[npt.NDArray[np.uint8]]) -> None:
            for rows_NB in some:
                rows_NB[..., :num_bytes] = value  # without the GIL

        if self._pool is None or sum(map(np.size, rows)) <= _PIECE_BYTES:
            mark_all(rows)
        else:
            self._share(mark_all, rows)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def _share(self, work: Callable[[Sequence[Any]], None], pieces: Sequence[Any]) -> None:
        assert self._pool is not None
        # Handed out at once: to hand over each piece would take as long as to copy a megabyte.
        for _ in self._pool.map(work, [pieces[i :: self._threads] for i in range(self._threads)]):
            pass


def _copy_all(copies: Sequence[Copy]) -> None:
    for there, here in copies:
        np.copyto(there, here)  # without the GIL


def _pieces(there: npt.NDArray[np.uint8], here: npt.NDArray[np.uint8]) -> list[Copy]:
    num_rows = there.shape[-2]
    rows = max(1, _PIECE_BYTES * num_rows // max(1, there.nbytes))
    return [(there[..., i : i + rows, :], here[..., i : i + rows, :]) for i in range(0, num_rows, rows)]
