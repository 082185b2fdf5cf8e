"""Buffers that a thread uses again and again, since fresh memory costs about as much as filling it."""

import threading

import numpy as np
import numpy.typing as npt

_local = threading.local()


def scratch(purpose: str, nbytes: int) -> npt.NDArray[np.uint8]:
    """At least [nbytes] uint8 with any content; this thread's next call with the same purpose returns it again."""
    buffer: npt.NDArray[np.uint8] | None = getattr(_local, purpose, None)
    if buffer is None or len(buffer) < nbytes:
        buffer = np.empty(nbytes, dtype=np.uint8)
        setattr(_local, purpose, buffer)
    return buffer[:nbytes]
