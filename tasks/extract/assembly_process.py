"""An assembly in a process of its own beside the engine's worker.

Encoding takes a dozen threads, and each takes the interpreter's lock some hundred times a second. In the worker's own
process the engine, which launches thousands of kernels a step from Python, would wait for them: extraction then ran
at two thirds of the speed of prefill. Here the worker only copies a step into memory that both processes share and
says so. Receipts go from here straight to the flow's process.
"""

import mmap
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socketpair
from time import process_time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract import row_facts
from tasks.extract.assemble import Arrived, RowSummary
from tasks.extract.assembly import Assembly, AssemblySpec, Place, Wanted
from tasks.extract.row_facts import RowFacts

ENDED = "the process that writes samples ended"
_ALIGNMENT = 4096

# For glibc: keep what encoding has used instead of giving it back to the system after each chunk. That costs a fifth of
# the processor time on two cores, and on many the others wait, too, while memory is mapped and unmapped.
_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(16 << 20),
}


class AssemblyDied(RuntimeError):
    """The process that assembles and writes samples ended."""


@dataclass(frozen=True)
class Slot:
    """One step's place in the shared memory, as either process sees it."""

    index: int
    memory: npt.NDArray[np.uint8]
    """Of :func:`slot_bytes` bytes."""
    spec: AssemblySpec

    def views(self, num_rows: int, kept_rows: int) -> tuple[torch.Tensor, RowSummary]:
        """Where a step's kept states [L, n, H] and the summary of all its rows stand."""
        states_LNB, *columns = map(torch.from_numpy, self._arrays(num_rows, kept_rows))
        return states_LNB.view(self.spec.torch_dtype), RowSummary(*columns)

    def arrived(self, num_rows: int, kept_rows: int) -> Arrived:
        """The same as arrays."""
        states_LNB, *columns = self._arrays(num_rows, kept_rows)
        return Arrived(states_LNB, RowFacts(*columns))

    def _arrays(self, num_rows: int, kept_rows: int) -> Iterator[npt.NDArray[Any]]:
        depths = self.spec.num_depths
        states = np.uint8, (depths, kept_rows, self.spec.row_bytes)
        start = 0
        for dtype, shape in (states, *row_facts.layout(num_rows, depths)):
            stop = start + np.dtype(dtype).itemsize * prod(shape)
            yield self.memory[start:stop].view(dtype).reshape(shape)
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT


def slot_bytes(spec: AssemblySpec, max_rows: int) -> int:
    """Size of a slot for steps of so many rows; a rank that keeps no states needs room for summaries only."""
    states = spec.num_depths * spec.row_bytes if spec.keeps_any else 0
    size = max_rows * (states + RowFacts.row_bytes(spec.num_depths)) + 7 * _ALIGNMENT
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _slots(descriptor: int, count: int, size: int, spec: AssemblySpec) -> tuple[npt.NDArray[np.uint8], list[Slot]]:
    """The shared memory as a whole, and slot by slot."""
    whole = np.frombuffer(mmap.mmap(descriptor, count * size), np.uint8)
    return whole, [Slot(i, whole[i * size : (i + 1) * size], spec) for i in range(count)]


class AssemblyProcess:
    """The worker's side: has the methods of :class:`tasks.extract.assembly.Assembly`, and the slots.

    The other process ends when this one does, since their connection ends then, or when it is closed.
    """

    def __init__(self, spec: AssemblySpec, *, slots: int, max_rows: int) -> None:
        self._delivered = 0
        self._error: AssemblyDied | None = None
        self._free: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._reports: queue.SimpleQueue[dict[str, float] | None] = queue.SimpleQueue()
        self._sending = threading.Lock()
        self._pinned = False

        size = slot_bytes(spec, max_rows)
        memory = os.memfd_create("layertap-ring")
        os.truncate(memory, slots * size)
        self._whole, self._slots = _slots(memory, slots, size, spec)
        for slot in self._slots:
            self._free.put(slot)
        ours, theirs = socketpair()
        with theirs:
            # Not forked: a child of a process with threads and CUDA may find a lock held for ever.
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno()), str(memory)],
                pass_fds=(theirs.fileno(), memory),
                stdin=subprocess.DEVNULL,
                env=_MALLOC | os.environ | {"PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)},
            )
        os.close(memory)
        self._connection: Connection[Any, Any] = Connection(ours.detach())
        self._send(spec, slots, size)
        try:
            self._connection.recv()  # it is ready
        except (EOFError, OSError) as error:
            self._process.wait()
            raise AssemblyDied(f"{ENDED} before it began; its output says why") from error
        self._reader = threading.Thread(target=self._receive, name="layertap-slots", daemon=True)
        self._reader.start()

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def pid(self) -> int:
        return self._process.pid

    def pin(self) -> None:
        """Lock the shared memory for copies from a GPU that do not wait for the CPU.

        Raises:
            MemoryError: the system does not allow so much.
        """
        code = _cudart().cudaHostRegister(self._whole.ctypes.data, self._whole.nbytes, 0)
        if int(code) != 0:
            raise MemoryError(
                f"{self._whole.nbytes / 2**30:.1f} GiB of host memory cannot be pinned (CUDA error {int(code)}); "
                "use fewer ring_slots or a smaller max_num_batched_tokens"
            )
        self._pinned = True

    @property
    def delivered(self) -> int:
        """Steps whose rows have been taken out of their slots.

        Raises:
            AssemblyDied: the other process ended.
        """
        if self._error is not None:
            raise self._error
        return self._delivered

    def free_slot(self) -> Slot:
        """A slot that no step is in; waits for one.

        Raises:
            AssemblyDied: the other process ended.
        """
        slot = self._free.get()
        if slot is None:
            self._free.put(None)
            raise self._error or AssemblyDied("closed")
        return slot

    def deliver(self, slot: Slot, places: Sequence[Place], num_rows: int, kept_rows: int) -> None:
        self._send("deliver", slot.index, list(places), num_rows, kept_rows)

    def expect(self, wanted: Iterable[Wanted]) -> None:
        self._send("expect", list(wanted))

    def forget_prefixes(self) -> None:
        self._send("forget_prefixes")

    def refuse(self, key: str, shape: tuple[int, ...], dtype: str) -> None:
        self._send("refuse", key, shape, dtype)

    def settle(self, question: int, keys: Sequence[str]) -> None:
        self._send("settle", question, list(keys))

    def report(self) -> dict[str, float]:
        self._send("report")
        return self._answer()

    def close(self) -> dict[str, float]:
        self._send("close")
        report = self._answer()
        self._reader.join()
        if self._pinned:
            _cudart().cudaHostUnregister(self._whole.ctypes.data)
        return report

    def _answer(self) -> dict[str, float]:
        report = self._reports.get()
        if report is None:
            raise self._error or AssemblyDied("closed")
        return report

    def _send(self, *message: Any) -> None:
        if self._error is not None:
            raise self._error
        try:
            with self._sending:
                self._connection.send(message)
        except OSError as error:
            raise AssemblyDied(ENDED) from error

    def _receive(self) -> None:
        reason = ENDED
        try:
            while True:
                match self._connection.recv():
                    case ("free", index):
                        self._delivered += 1
                        self._free.put(self._slots[index])
                    case ("report", report):
                        self._reports.put(report)
                    case ("failed", text):
                        reason = text
        except (EOFError, OSError):
            self._error = AssemblyDied(reason)
            self._free.put(None)
            self._reports.put(None)
            self._process.wait()


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


class _Other:
    """The other side: an assembly, and a queue that keeps what it is told in order."""

    def __init__(self, connection: "Connection[Any, Any]", memory: int) -> None:
        self._connection = connection
        spec, slots, size = connection.recv()
        _, self._slots = _slots(memory, slots, size, spec)
        self._assembly = Assembly(spec)
        self._messages: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self._send("ready")

    def run(self) -> None:
        threading.Thread(target=self._work, name="layertap-assembly", daemon=True).start()
        while True:  # the worker never waits for this process to read
            self._messages.put(self._connection.recv())

    def _work(self) -> None:
        do: dict[str, Callable[..., Any]] = {
            "deliver": self._deliver,
            "expect": self._assembly.expect,
            "forget_prefixes": self._assembly.forget_prefixes,
            "refuse": self._assembly.refuse,
            "settle": self._assembly.settle,
            "report": lambda: self._send("report", self._assembly.report() | _resources()),
        }
        try:
            while (message := self._messages.get())[0] != "close":
                do[message[0]](*message[1:])
            self._send("report", self._assembly.close() | _resources())
            os._exit(0)
        except BaseException as error:
            self._send("failed", f"the process that writes samples failed: {type(error).__name__}: {error}")
            os._exit(1)

    def _deliver(self, index: int, places: list[Place], num_rows: int, kept_rows: int) -> None:
        self._assembly.deliver(places, self._slots[index].arrived(num_rows, kept_rows))
        self._send("free", index)

    def _send(self, *message: Any) -> None:
        self._connection.send(message)


def _resources() -> dict[str, float]:
    """Peak of this process's memory in bytes, and its processor time in seconds, all threads together."""
    with open("/proc/self/status", encoding="ascii") as status:  # noqa: PTH123
        peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return {"host_bytes": peak, "ran": process_time()}


def main() -> None:
    """Serve the worker that started this process, until it closes the connection or ends."""
    torch.set_num_threads(1)  # the threads here are the writers'
    try:
        _Other(Connection(int(sys.argv[1])), int(sys.argv[2])).run()
    except (EOFError, OSError):
        os._exit(1)


if __name__ == "__main__":
    main()
