"""Rows of shared prefixes that are in a staged file already, and need not be copied, digested and encoded again.

Where most samples begin alike, copying the rows of their beginnings within host memory is most of what there is to do.
Once one sample's chunk of them is staged, or on its way, every further sample links to its file. It does so only if
the device has computed the same digests for the rows of both; what arrived in host memory of the first is part of the
verification of all.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import ChunkGone, SharedChunk


class PromiseBroken(ChunkGone):
    """A sample could not be staged whose chunks others were to link to."""


class StagedFiles(NamedTuple):
    """What there is of staged rows."""

    arrived_TL: npt.NDArray[np.int64]
    """Digests of the rows as they stood in host memory."""
    chunks: Mapping[str, SharedChunk]
    """At all depths, by their path in a sample."""


@dataclass(frozen=True, eq=False)
class StagedRows:
    """Rows [start, stop) that a sample has staged, or is about to."""

    start: int
    stop: int
    digests: bytes
    """Of these rows, as the device computed them: int64 [rows, L]."""
    _files: "Future[StagedFiles | None]" = field(default_factory=Future)

    def files(self) -> StagedFiles:
        """Waits for the sample that stages them.

        Raises:
            PromiseBroken: it could not be staged.
        """
        if (files := self._files.result()) is None:
            raise PromiseBroken(f"rows [{self.start}, {self.stop}) were to be staged by a sample that could not be")
        return files

    @property
    def failed(self) -> bool:
        return self._files.done() and self._files.result() is None

    def settle(self, files: StagedFiles | None) -> None:
        """Say what was staged, or that nothing was; the first word counts."""
        if not self._files.done():
            self._files.set_result(files)


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
        self._chunk = 0
        """Tokens of a chunk, once one was seen."""

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
                if rows is None or rows.failed or rows.start < start or rows.stop > stop:
                    continue
                self._staged.move_to_end(name)
                if rows.digests == digests_TL[rows.start : rows.stop].tobytes():
                    found.append(rows)
        return found

    def promise(self, names: Sequence[bytes], shared: int, digests_TL: npt.NDArray[np.int64]) -> list[StagedRows]:
        """Rows that a sample, which is about to be staged, is the first to stage. Each must be settled.

        Args:
            names: of the sample's blocks.
            shared: tokens with which others may begin, too.
            digests_TL: of all its rows, as the device computed them.
        """
        with self._lock:
            # A sample that is no longer than a chunk has one of another shape.
            if not self._chunk or len(digests_TL) <= self._chunk:
                return []
            promised = []
            for stop in range(self._chunk, shared + 1, self._chunk):
                last = (stop - 1) // self._block
                if last < len(names) and ((known := self._staged.get(names[last])) is None or known.failed):
                    rows = StagedRows(stop - self._chunk, stop, digests_TL[stop - self._chunk : stop].tobytes())
                    self._keep(names[last], rows)
                    promised.append(rows)
            return promised

    def learn(
        self,
        names: Sequence[bytes],
        promised: Sequence[StagedRows],
        chunks: Mapping[str, SharedChunk],
        digests_TL: npt.NDArray[np.int64],
        arrived_TL: npt.NDArray[np.int64],
    ) -> None:
        """Note chunks of a sample that was staged.

        Args:
            names: of the sample's blocks.
            promised: rows that it was to stage.
            chunks: by their path.
            digests_TL: of all its rows, as the device computed them.
            arrived_TL: of all its rows, as they stood in host memory.
        """
        ranges: dict[tuple[int, int], dict[str, SharedChunk]] = {}
        for path, chunk in chunks.items():
            ranges.setdefault((chunk.start, chunk.stop), {})[path] = chunk
        owed = {(rows.start, rows.stop): rows for rows in promised}
        there: list[tuple[StagedRows, Mapping[str, SharedChunk]]] = []
        with self._lock:
            for (start, stop), of_range in ranges.items():
                if sum(chunk.depths for chunk in of_range.values()) != digests_TL.shape[1]:
                    continue
                self._chunk, last = stop - start, (stop - 1) // self._block
                rows = owed.get((start, stop))
                if rows is None:
                    if last >= len(names) or names[last] in self._staged:
                        continue
                    rows = StagedRows(start, stop, digests_TL[start:stop].tobytes())
                    self._keep(names[last], rows)
                there.append((rows, of_range))
        for rows, staged in there:  # outside: the assembly of the next step needs the lock
            rows.settle(StagedFiles(arrived_TL[rows.start : rows.stop].copy(), staged))

    def _keep(self, name: bytes, rows: StagedRows) -> None:
        self._staged[name] = rows
        self._staged.move_to_end(name)
        while len(self._staged) > self._limit:
            self._staged.popitem(last=False)

    def clear(self) -> None:
        """Let go of everything."""
        with self._lock:
            self._staged.clear()
            self._chunk = 0
