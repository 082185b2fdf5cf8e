"""Prefixes of token ids, named by content: what two samples begin with alike has one name in plan and engine."""

import hashlib

import numpy as np
import numpy.typing as npt

NAME_BYTES = 16


def prefix_names(input_ids: npt.ArrayLike, block: int) -> list[bytes]:
    """A chained hash for each whole block of tokens: the name of all tokens up to that block's end.

    Args:
        input_ids: [T]
        block: tokens of a block.

    Returns:
        T // block names of 16 bytes each
    """
    ids_T = np.ascontiguousarray(input_ids, dtype="<i4")
    running = hashlib.blake2b(digest_size=NAME_BYTES)
    names = []
    for stop in range(block, len(ids_T) + 1, block):
        running.update(ids_T[stop - block : stop].data)
        names.append(running.copy().digest())
    return names
