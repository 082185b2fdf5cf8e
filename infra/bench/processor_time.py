"""What processes cost: the processor time of this process and of all that it started, by groups, over a window."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

TICK = 1 / os.sysconf("SC_CLK_TCK")
REST = "rest of the machine"


class ProcessorTime:
    """Reads the processor time of this process and its descendants every few seconds; a context manager."""

    def __init__(self, group: Callable[[list[str]], str], interval_s: float = 5.0) -> None:
        """Read nothing yet.

        Args:
            group: names the group of a process by the command lines of its ancestors, beginning with the child of this
                process, and its own, the last; those of this process itself are none.
            interval_s: seconds between two readings.
        """
        self._group, self._interval_s = group, interval_s
        self._groups: dict[int, str] = {}
        self._seconds: dict[int, float] = {}
        self._readings: list[tuple[float, dict[str, float]]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="processor-time", daemon=True)

    def __enter__(self) -> "ProcessorTime":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def cores(self, begin: float, end: float) -> dict[str, float]:
        """Cores that each group, and :data:`REST`, kept busy between two moments of :func:`time.time`."""
        first, last = (min(self._readings, key=lambda each: abs(each[0] - moment)) for moment in (begin, end))
        seconds = last[0] - first[0]
        return {name: (spent - first[1].get(name, 0.0)) / seconds for name, spent in last[1].items()} if seconds else {}

    def _run(self) -> None:
        while True:
            self._read()
            if self._ended.wait(self._interval_s):
                return

    def _read(self) -> None:
        parents: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            try:
                pid = int(path.parent.name)
                parents[pid], seconds[pid] = parent_and_seconds(pid)
            except OSError:  # it has ended
                continue
        for pid in seconds:
            if (chain := _chain(pid, parents)) is not None:  # each time: what has just been forked is not yet itself
                self._groups[pid] = self._group([_command(each) for each in chain])
            if pid in self._groups:
                self._seconds[pid] = seconds[pid]
        sums: dict[str, float] = {}
        for pid, spent in self._seconds.items():  # those that have ended, too
            sums[self._groups[pid]] = sums.get(self._groups[pid], 0.0) + spent
        # user, nice, system, and both kinds of interrupts; idle and what waits for a disk are no work
        fields = Path("/proc/stat").read_text().split(None, 8)[1:8]
        busy = sum(int(fields[i]) for i in (0, 1, 2, 5, 6)) * TICK
        self._readings.append((time.time(), sums | {REST: busy - sum(sums.values())}))


def parent_and_seconds(pid: int) -> tuple[int, float]:
    """A process's parent, and the processor time that it has spent."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return int(fields[1]), (int(fields[11]) + int(fields[12])) * TICK


def _chain(pid: int, parents: dict[int, int]) -> list[int] | None:
    """From this process's child down to the given one; None if it is no descendant."""
    chain: list[int] = []
    while pid != os.getpid():
        chain.insert(0, pid)
        if (pid := parents.get(pid, 0)) == 0:
            return None
    return chain


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
