"""Nodes that take chunks: each chunk goes to a free one, and to another if that dies."""

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from tasks.report.log import logger

N = TypeVar("N")
R = TypeVar("R")


class NodeDied(RuntimeError):
    """A node is gone, and with it what it was doing."""


class NoNodes(RuntimeError):
    """Every node has died."""


class Pool(Generic[N]):
    """Gives work to the node that is least busy; any number of threads may ask."""

    def __init__(
        self, nodes: Sequence[N], slots: int, attempts: int = 3, bury: Callable[[N], None] = lambda node: None
    ) -> None:
        """Take nodes that are ready.

        Args:
            nodes: at least one.
            slots: how much each may do at a time.
            attempts: nodes that one piece of work may outlive, before it is held to be what kills them.
            bury: called once with each node that died, before its work goes to another.
        """
        self._free = dict.fromkeys(range(len(nodes)), slots)
        self._nodes = list(nodes)
        self._attempts = attempts
        self._bury = bury
        self._changed = threading.Condition()
        self._burying: set[int] = set()

    @property
    def alive(self) -> list[N]:
        """The nodes that have not died."""
        with self._changed:
            return [self._nodes[number] for number in self._free]

    def run(self, work: Callable[[N], R]) -> R:
        """Do the work on a free node, as soon as there is one; on another if that raises :class:`NodeDied`.

        Raises:
            NoNodes: none is left.
            NodeDied: as many nodes as may have died of it.
        """
        for attempt in range(1, self._attempts + 1):
            number = self._take()
            try:
                return work(self._nodes[number])
            except NodeDied as error:
                self._remove(number, error)
                if attempt == self._attempts:
                    raise
            finally:
                with self._changed:
                    if number in self._free:
                        self._free[number] += 1
                    self._changed.notify_all()
        raise AssertionError("unreachable")

    def _take(self) -> int:
        with self._changed:
            while self._free:
                number = max(self._free, key=lambda each: self._free[each])
                if self._free[number] > 0:
                    self._free[number] -= 1
                    return number
                self._changed.wait()
        raise NoNodes("no node is left; start nodes and run again, what is committed stays")

    def _remove(self, number: int, error: NodeDied) -> None:
        with self._changed:
            first = self._free.pop(number, None) is not None
            if first:
                self._burying.add(number)
        if first:
            logger.warning(f"a node died ({error}); {len(self._free)} are left, and its chunks go to them")
            try:
                self._bury(self._nodes[number])
            finally:
                with self._changed:
                    self._burying.discard(number)
                    self._changed.notify_all()
        with self._changed:
            # Its other work waits until the dead can do nothing more, too.
            self._changed.wait_for(lambda: number not in self._burying)
