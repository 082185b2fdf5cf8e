"""Rows of shared prefixes, held in host memory for samples whose engine takes the prefix from its KV cache.

The engine does not compute a token's row again whose keys and values it still has, so no step shows it. It is here:
with all that the device said of it when it was computed, so that every check of a sample covers its reused rows too.

All ranks hold the same blocks and let go of the same ones, whether or not they hold the states themselves; what one
rank finds, all find.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract.copies import Copies, Copy
from tasks.extract.memory import fresh_memory
from tasks.extract.row_facts import RowFacts
from tasks.extract.staged_rows import StagedPrefixes, StagedRows, uncovered


class Rows(Protocol):
    """A sample's rows, as :class:`tasks.extract.assemble.Sample` has them."""

    key: str
    bytes_LTB: npt.NDArray[np.uint8] | None
    facts: RowFacts


class Reused(NamedTuple):
    """Rows [start, stop) that were computed for the sample with the key ``source``."""

    start: int
    stop: int
    source: str


class Holding(NamedTuple):
    """Rows of a sample from ``start`` on, to be held as blocks of these names, one after another."""

    sample: Rows
    names: Sequence[bytes]
    start: int


class Filled(NamedTuple):
    """What became of rows that were asked for."""

    reused: list[Reused]
    staged: list[StagedRows]
    """Of these, rows whose states need not be copied, since they are in staged files; in order."""
    copies: list[Copy]
    """Of states, still to be made."""


class _Held(NamedTuple):
    slot: int
    source: str


class _Run(NamedTuple):
    """Rows that are held one behind the other, as they are in a sample."""

    held: int
    """The first one's place."""
    start: int
    """Its position in the sample."""
    size: int


class PrefixRows:
    """Blocks of rows by the name of the prefix that ends with them; the least recently used go first."""

    def __init__(
        self,
        *,
        block: int,
        num_depths: int,
        hidden_size: int,
        dtype: torch.dtype,
        limit_bytes: int,
        holds_states: bool,
        copies: Copies | None = None,
    ) -> None:
        """Make room; memory is taken up only as it is filled.

        Args:
            block: rows of a block, as many as in a block of the engine's KV cache.
            num_depths: L
            hidden_size: H
            dtype: of the states.
            limit_bytes: bound on the blocks with their states, whether or not this rank holds those.
            holds_states: whether it does.
            copies: copies states; in the caller's thread when absent.
        """
        self.block = block
        self.holds_states = holds_states
        self._copies = copies or Copies()
        row_bytes = num_depths * hidden_size * dtype.itemsize + RowFacts.row_bytes(num_depths)
        self.slots = limit_bytes // (block * row_bytes)
        self._facts = RowFacts.empty(self.slots * block, num_depths)
        self.staged = StagedPrefixes(block, limit=self.slots)
        """Told by whoever stages samples."""
        held_rows = self.slots * block if holds_states else 0
        self._bytes_LRB = fresh_memory(num_depths, held_rows, hidden_size * dtype.itemsize)
        self._held: OrderedDict[bytes, _Held] = OrderedDict()
        self._free = deque(range(self.slots))

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def hold(self, holdings: Iterable[Holding]) -> None:
        """Copy blocks of samples' rows; those held already stay as they are."""
        taken: dict[int, tuple[Rows, int]] = {}  # slot -> first row; where there are too few, later blocks displace
        for sample, names, start in holdings:
            for block, slot in self._take_slots(sample.key, names).items():
                taken[slot] = sample, start + block * self.block
        placed: dict[str, tuple[Rows, list[_Run]]] = {}
        for slot, (sample, first) in taken.items():
            placed.setdefault(sample.key, (sample, []))[1].append(_Run(slot * self.block, first, self.block))
        copies: list[Copy] = []
        for sample, runs in placed.values():
            for held, first, size in _joined(runs):
                self._facts.put(held, sample.facts, first, first + size)
                if self.holds_states:
                    assert sample.bytes_LTB is not None
                    there, here = slice(held, held + size), slice(first, first + size)
                    copies.append((self._bytes_LRB[:, there], sample.bytes_LTB[:, here]))
        self._copies.run(copies)

    def _take_slots(self, key: str, names: Sequence[bytes]) -> dict[int, int]:
        """Slots for the blocks among ``names`` that are not held; by their position there, in ascending order."""
        taken: dict[bytes, int] = {}
        for name in names:
            if name in self._held:
                self._held.move_to_end(name)
            elif self.slots:
                if self._free:
                    slot = self._free.popleft()
                else:
                    displaced, (slot, _) = self._held.popitem(last=False)
                    taken.pop(displaced, None)
                self._held[name] = _Held(slot, key)
                taken[name] = slot
        # Blocks in a row, one behind the other in memory as well, are copied at once.
        for name, slot in zip(taken, sorted(taken.values()), strict=True):
            self._held[name] = _Held(slot, key)
        return {block: self._held[name].slot for block, name in enumerate(names) if name in taken}

    def fill(self, sample: Rows, names: Sequence[bytes], start: int, stop: int, *, states: bool) -> Filled | None:
        """Fill rows [start, stop) of a sample, but for the states, of which it says what to copy.

        Args:
            sample: to be filled.
            names: of the sample's blocks, from its beginning.
            start: first row.
            stop: behind the last row.
            states: whether its states are to be filled, too.

        Returns:
            Where they are from; None if some are no longer held, and none is filled then. The copies must be made
            before anything else is held.
        """
        blocks = range(start // self.block, -(-stop // self.block))
        if blocks.stop > len(names) or any(names[block] not in self._held for block in blocks):
            return None
        held = [self._held[names[block]] for block in blocks]
        found: list[Reused] = []
        pieces: list[_Run] = []
        for block, (slot, source) in zip(blocks, held, strict=True):
            first, last = max(start, block * self.block), min(stop, (block + 1) * self.block)
            pieces.append(_Run(slot * self.block + first - block * self.block, first, last - first))
            if found and found[-1].source == source:
                first = found.pop().start
            found.append(Reused(first, last, source))
        runs = _joined(pieces)
        for run in runs:
            sample.facts.put(run.start, self._facts, run.held, run.held + run.size)
        staged: list[StagedRows] = []
        copies: list[Copy] = []
        if states and self.holds_states and sample.bytes_LTB is not None:
            staged = self.staged.find(names, start, stop, sample.facts.digests_NL)
            for begin, end in uncovered(staged, start, stop):
                for run in runs:
                    first, last = max(begin, run.start), min(end, run.start + run.size)
                    if first < last:
                        at = run.held + first - run.start
                        copies.append((sample.bytes_LTB[:, first:last], self._bytes_LRB[:, at : at + last - first]))
        return Filled(found, staged, copies)

    def touch(self, names: Iterable[bytes]) -> None:
        """Note that a prefix was used. Its end goes before its beginning, which more samples share."""
        for name in reversed(list(names)):
            if name in self._held:
                self._held.move_to_end(name)

    def clear(self) -> None:
        """Let go of everything."""
        self._free = deque(range(self.slots))
        self._held.clear()
        self.staged.clear()


def _joined(runs: Iterable[_Run]) -> list[_Run]:
    """Runs of which one goes on where the one before ends, in both places, made one."""
    joined: list[_Run] = []
    for run in runs:
        last = joined[-1] if joined else None
        if last and (last.held + last.size, last.start + last.size) == run[:2]:
            joined[-1] = last._replace(size=last.size + run.size)
        else:
            joined.append(run)
    return joined
