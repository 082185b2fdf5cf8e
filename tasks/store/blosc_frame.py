"""Chunks as blosc frames, which any reader of Zarr decodes, with zstd set to what hidden states are like.

Of a state's bytes some are noise, and those with sign and exponent are all but independent of each other: short
repetitions are chance. To look for them costs time and, since each is written down, room. blosc can be given no more of
zstd than a level, and each of those looks for repetitions of a few bytes. Here the method of the first level looks for
seven, and remembers few places: that is three times as fast, a hundredth smaller, and quicker to decode. Padding and
equal rows near each other are still found.

The format is blosc's, version 1 (``README_CHUNK_FORMAT.rst`` of c-blosc).
"""

import struct
import threading
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

#: Most chunks are one block then: each costs a thread three turns of the interpreter's lock, which dozens may wait for.
BLOCK_BYTES = 4 << 20
_HEADER = struct.Struct("<BBBBiii")
_VERSION, _ZSTD_VERSION = 2, 1
_SHUFFLED, _NOT_COMPRESSED, _BLOCKS_ARE_WHOLE, _ZSTD = 0x01, 0x02, 0x10, 4 << 5
_PARAMETERS = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=20,
    hash_log=8,
    chain_log=6,  # not used by this strategy, nor is the next
    search_log=1,
    min_match=7,
    target_length=0,
)
_thread = threading.local()


def compress(values: npt.NDArray[Any], *, shuffle: bool) -> list[bytes]:
    """A frame of an array's elements, in parts, since the GIL would be held while they are joined.

    Args:
        values: contiguous, at least one; of 1, 2, 4 or 8 bytes each.
        shuffle: whether the first bytes of all elements of a block come first, then the second ones, and so on.
    """
    item = values.itemsize
    words = values.reshape(-1).view(f"u{item}")
    if not hasattr(_thread, "zstd"):
        _thread.zstd = zstandard.ZstdCompressor(compression_params=_PARAMETERS)
        _thread.planes = np.empty(BLOCK_BYTES, np.uint8)

    def header(flags: int, size: int) -> bytes:
        sizes = words.nbytes, min(BLOCK_BYTES, words.nbytes), size
        return _HEADER.pack(_VERSION, _ZSTD_VERSION, flags | (_SHUFFLED if shuffle else 0), item, *sizes)

    step = BLOCK_BYTES // item
    blocks = [_block(words[i : i + step], shuffle and item > 1) for i in range(0, len(words), step)]
    start = _HEADER.size + 4 * len(blocks)
    first, *ends = accumulate((4 + len(block) for block in blocks), initial=start)
    if ends[-1] >= _HEADER.size + words.nbytes:
        plain = words.tobytes()
        return [header(_ZSTD | _BLOCKS_ARE_WHOLE | _NOT_COMPRESSED, _HEADER.size + len(plain)), plain]
    parts = [header(_ZSTD | _BLOCKS_ARE_WHOLE, ends[-1]), struct.pack(f"<{len(blocks)}i", first, *ends[:-1])]
    for block in blocks:
        parts += [struct.pack("<i", len(block)), block]
    return parts


def _block(words: npt.NDArray[Any], shuffle: bool) -> bytes:
    """What stands in the frame for a block: zstd's own frame, or its bytes as they are where that is no shorter."""
    data = words.view(np.uint8)
    if shuffle:
        data = _thread.planes[: words.nbytes]
        for plane, lowest in zip(data.reshape(words.itemsize, -1), range(0, 8 * words.itemsize, 8), strict=True):
            # Four times as fast as to copy every second byte.
            np.right_shift(words, lowest, out=plane, casting="unsafe")
    compressed: bytes = _thread.zstd.compress(data)
    return compressed if len(compressed) < len(data) else data.tobytes()
