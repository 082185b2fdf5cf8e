"""Rows of shared prefixes that are in a staged file already, and need not be copied, digested and encoded again.

Where most samples begin alike, copying the rows of their beginnings within host memory is most of what there is to do.
Once a chunk of them is staged, every further sample links to its file. What the file holds is known by the digests of
its rows as they stood in host memory when it was written: a sample links to it only if the digests that the device has
computed of the sample's own rows are the same.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import SharedChunk


class StagedRows(NamedTuple):
    """Rows [start, stop) whose chunks, at all depths, are staged."""

    start: int
    stop: int
    digests_TL: npt.NDArray[np.int64]
    """Of these rows as they stood in host memory."""
    chunks: Mapping[str, SharedChunk]
    """By their path in a sample."""


def uncovered(staged: Sequence[StagedRows], start: int, stop: int) -> list[tuple[int, int]]:
    """Rows [start, stop) without those that are staged; ``staged`` in order."""
    bounds = [start, *(bound for rows in staged for bound in (rows.start, rows.stop)), stop]
    return [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]


class StagedPrefixes:
    """Staged rows by the name of the first prefix that holds them all; the least recently used go first.

    Safe to call from any thread. What one rank has staged another need not know: it decides how a sample is written,
    not whether its rows are found.
    """

    def __init__(self, block: int, limit: int) -> None:
        """``block``: tokens from one name of a prefix to the next; ``limit``: entries."""
        self._block, self._limit = block, limit
        self._lock = threading.Lock()
        self._staged: OrderedDict[bytes, StagedRows] = OrderedDict()

    def find(
        self, names: Sequence[bytes], start: int, stop: int, digests_TL: npt.NDArray[np.int64]
    ) -> list[StagedRows]:
        """Staged rows among [start, stop) of a sample, in order.

        Args:
            names: of the sample's blocks, from its beginning.
            start: first row.
            stop: behind the last row.
            digests_TL: of the sample's rows, as the device computed them.
        """
        found: list[StagedRows] = []
        with self._lock:
            for name in names[start // self._block : -(-stop // self._block)]:
                rows = self._staged.get(name)
                if rows is None or rows.start < start or rows.stop > stop:
                    continue
                self._staged.move_to_end(name)
                if np.array_equal(rows.digests_TL, digests_TL[rows.start : rows.stop]):
                    found.append(rows)
        return found

    def learn(
        self,
        names: Sequence[bytes],
        chunks: Mapping[str, SharedChunk],
        digests_TL: npt.NDArray[np.int64],
    ) -> None:
        """Note chunks of a staged sample.

        Args:
            names: of the sample's blocks.
            chunks: by their path.
            digests_TL: of all its rows, as they stood in host memory.
        """
        ranges: dict[tuple[int, int], dict[str, SharedChunk]] = {}
        for path, chunk in chunks.items():
            ranges.setdefault((chunk.start, chunk.stop), {})[path] = chunk
        num_depths = digests_TL.shape[1]
        with self._lock:
            for (start, stop), of_range in ranges.items():
                last = (stop - 1) // self._block
                if last < len(names) and sum(chunk.depths for chunk in of_range.values()) == num_depths:
                    rows = StagedRows(start, stop, digests_TL[start:stop].copy(), of_range)
                    self._staged[names[last]] = rows
                    self._staged.move_to_end(names[last])
            while len(self._staged) > self._limit:
                self._staged.popitem(last=False)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._staged.clear()
