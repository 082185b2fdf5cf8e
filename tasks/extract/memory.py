"""Host memory for captured samples: bounded, and used again instead of returned to the system.

Memory fresh from the system is zeroed page by page when it is first touched. On a host with GPUs, 45 GB of samples cost
35 s of the system's processor time in pages of 4 KiB, and 19 s in huge ones.
"""

import mmap
import threading
from contextlib import suppress
from math import prod
from time import perf_counter

import numpy as np
import numpy.typing as npt

_HUGE_BYTES = 2 << 20  # of a huge page


def fresh_memory(*shape: int) -> npt.NDArray[np.uint8]:
    """Fresh memory with arbitrary content; much of it in huge pages, where the system has them."""
    num_bytes = prod(shape)
    if num_bytes < _HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.empty(shape, np.uint8)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has no huge pages
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8).reshape(shape)


class HostMemory:
    """Gives buffers to samples; blocks the capture while the writers hold too much."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        """Bytes, of all buffers together."""
        self.waited = 0.0
        """Seconds that the capture has waited for the writers."""
        self._held = 0
        self._writing = 0
        self._spare: list[npt.NDArray[np.uint8]] = []
        self._spare_bytes = 0
        self._changed = threading.Condition()

    def take(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """A buffer of at least ``num_bytes`` with arbitrary content; waits until there is room for it.

        Never waits while no sample is being written, since none could make room: a single sample may be larger than
        the limit.
        """
        with self._changed:
            if self._held + num_bytes > self.limit and self._writing:
                began = perf_counter()
                self._changed.wait_for(lambda: self._held + num_bytes <= self.limit or not self._writing)
                self.waited += perf_counter() - began
            fitting = [(b.nbytes, i) for i, b in enumerate(self._spare) if num_bytes <= b.nbytes <= 2 * num_bytes]
            if fitting:
                buffer = self._spare.pop(min(fitting)[1])
                self._spare_bytes -= buffer.nbytes
                self._held += buffer.nbytes
                return buffer
            # An eighth of slack, so that samples of similar lengths can take each other's place.
            size = num_bytes + num_bytes // 8
            self._held += size
            while self._spare and self._held + self._spare_bytes > self.limit:
                self._spare_bytes -= self._spare.pop(0).nbytes
        return fresh_memory(size)

    def writing(self) -> None:
        """A sample was handed to the writers."""
        with self._changed:
            self._writing += 1

    def give_back(self, buffer: npt.NDArray[np.uint8], *, written: bool) -> None:
        """A sample's buffer is free again, after it was ``written`` or when it was abandoned."""
        with self._changed:
            self._held -= buffer.nbytes
            self._writing -= written
            if self._held + buffer.nbytes + self._spare_bytes <= self.limit:
                self._spare.append(buffer)
                self._spare_bytes += buffer.nbytes
            self._changed.notify_all()
