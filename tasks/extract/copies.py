"""Copies of rows within host memory, by several threads.

One core copies 3 to 5 GB/s. That is enough for rows that are copied once, into their sample. Rows of shared prefixes
are copied into what is held for others as well, and from there into samples that begin with them: with MLA on two GPUs
some 5 GB/s a rank.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
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
        """``threads``: the caller's own among them."""
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads - 1, thread_name_prefix="layertap-copier") if threads > 1 else None

    def run(self, copies: Sequence[Copy]) -> None:
        """Make copies."""
        if self._pool is None or sum(there.nbytes for there, _ in copies) <= _PIECE_BYTES:
            _copy_all(copies)
        else:
            self._share(_copy_all, [piece for copy in copies for piece in _pieces(*copy)])

    def mark(self, rows: Sequence[npt.NDArray[np.uint8]], num_bytes: int, value: int) -> None:
        """Set the first bytes of rows, arrays [..., N, B]; it is what first touches their memory."""

        def mark_all(some: Iterable[npt.NDArray[np.uint8]]) -> None:
            for rows_NB in some:
                rows_NB[..., :num_bytes] = value  # without the GIL

        if self._pool is None or sum(map(np.size, rows)) <= _PIECE_BYTES:
            mark_all(rows)
        else:
            self._share(mark_all, rows)

    def _share(self, work: Callable[[Iterable[Any]], None], pieces: Iterable[Any]) -> None:
        """Work on pieces in all threads, the caller's among them; returns when all is done."""
        assert self._pool is not None
        left = iter(pieces)  # of which each thread takes the next
        others = [self._pool.submit(work, left) for _ in range(1, self._threads)]
        try:
            work(left)
        finally:
            begun = [other for other in others if not other.cancel()]
            wait(begun)
        for other in begun:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()


def _copy_all(copies: Iterable[Copy]) -> None:
    for there, here in copies:
        np.copyto(there, here)  # without the GIL


def _pieces(there: npt.NDArray[np.uint8], here: npt.NDArray[np.uint8]) -> list[Copy]:
    num_rows = there.shape[-2]
    rows = max(1, _PIECE_BYTES * num_rows // max(1, there.nbytes))
    return [(there[..., i : i + rows, :], here[..., i : i + rows, :]) for i in range(0, num_rows, rows)]
