"""The way of a step's rows from the device to host memory."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from tasks.extract.assemble import Arrived, summarize
from tasks.extract.assembly import Assembly, Place
from tasks.extract.assembly_process import AssemblyProcess, Slot
from tasks.extract.step import Span, Step

#: Whether the states of a request's rows are to come to this rank's host memory.
Wants = Callable[[Span], bool]


class Transfer(Protocol):
    """Takes steps in order and delivers them in order."""

    waited: float
    """Seconds that the engine has waited for room."""
    sent: int
    """Steps taken."""

    def send(self, step: Step) -> None: ...

    @property
    def delivered(self) -> int:
        """Steps that have arrived in the assembly. Raises what went wrong on the way."""

    def close(self) -> None: ...


class DirectTransfer:
    """For a CPU: the states are in host memory already and are delivered before the next step can overwrite them."""

    waited = 0.0

    def __init__(self, assembly: Assembly, wants: Wants) -> None:
        self._assembly, self._wants = assembly, wants
        self.sent = 0

    def send(self, step: Step) -> None:
        places = [(span, span.rows if self._wants(span) else None) for span in step.spans]
        summary = summarize(step.states, step.input_ids, step.witness)
        self._assembly.deliver(places, Arrived.of(step.states, summary))
        self.sent += 1

    @property
    def delivered(self) -> int:
        return self.sent

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _OnDevice:
    """A step whose rows are still to be copied; so long as it is held, their memory is given to no other tensor."""

    step: Step
    places: list[Place]
    runs: list[slice]
    computed: Any
    """torch.cuda.Event"""


class SharedRing:
    """Copies steps into a ring of buffers shared with the process that assembles them.

    From a GPU a thread does so, while the engine goes on: on a stream of its own it digests the rows and copies those
    that are kept into pinned memory, straight from the tensors that the model handed out. The engine waits only when
    as many steps as the ring has buffers are still to be copied.
    """

    def __init__(self, process: AssemblyProcess, wants: Wants, device: torch.device, *, lent: bool = False) -> None:
        """``lent``: whether a next step may write into the tensors of this one, as a graph of kernels does."""
        self.waited = 0.0
        self.sent = 0
        self._process, self._wants, self._lent = process, wants, lent
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if device.type == "cuda":
            process.pin()
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
            self._room = threading.Semaphore(process.num_slots)
            self._on_device: queue.SimpleQueue[_OnDevice | None] = queue.SimpleQueue()
            self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
            self._thread.start()

    def send(self, step: Step) -> None:
        """Take a step.

        Raises:
            RuntimeError: steps before it did not arrive.
        """
        self._raise_error()
        places, runs = self._choose(step)
        began = perf_counter()
        if self._thread is None:
            slot = self._process.free_slot()
            self.waited += perf_counter() - began
            self._process.deliver(slot, places, *_copy(step, runs, slot))
        else:
            self._room.acquire()
            self.waited += perf_counter() - began
            # The runner writes the next step's ids in the same place.
            step = replace(step, input_ids=step.input_ids.clone())
            if self._lent:
                step = replace(step, states=tuple(rows_NH.clone() for rows_NH in step.states))
            self._on_device.put(_OnDevice(step, places, runs, torch.cuda.current_stream().record_event()))
        self.sent += 1

    def _choose(self, step: Step) -> tuple[list[Place], list[slice]]:
        """Where each span's states come to be, if this rank keeps them; and the rows that it keeps, in runs."""
        places: list[Place] = []
        runs: list[slice] = []
        kept = 0
        for span in step.spans:
            if not self._wants(span):
                places.append((span, None))
                continue
            count = span.rows.stop - span.rows.start
            places.append((span, slice(kept, kept + count)))
            kept += count
            first = runs.pop().start if runs and runs[-1].stop == span.rows.start else span.rows.start
            runs.append(slice(first, span.rows.stop))
        return places, runs

    def _run(self) -> None:
        while (item := self._on_device.get()) is not None:
            try:
                self._bring(item)
            except BaseException as error:  # raised on the thread that can stop the engine
                self._error = error
            del item  # while the next one is waited for, the engine has use for its memory
            self._room.release()

    def _bring(self, item: _OnDevice) -> None:
        slot = self._process.free_slot()
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(item.computed)
            sizes = _copy(item.step, item.runs, slot)
            arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            arrived.record()
        arrived.synchronize()  # asleep, where it would else keep a core busy
        self._process.deliver(slot, item.places, *sizes)

    @property
    def delivered(self) -> int:
        self._raise_error()
        return self._process.delivered

    def _raise_error(self) -> None:
        if self._error is not None:
            raise RuntimeError(f"hidden states could not be copied to host memory: {self._error}") from self._error

    def close(self) -> None:
        if self._thread is not None:
            self._on_device.put(None)
            self._thread.join()


def _copy(step: Step, runs: Sequence[slice], slot: Slot) -> tuple[int, int]:
    """Copy a step's summary and the states of some of its rows, in the order of the current stream.

    Returns:
        Rows of the step, and those whose states are copied.
    """
    num_rows, kept_rows = step.input_ids.shape[0], sum(rows.stop - rows.start for rows in runs)
    states_there, summary_there = slot.views(num_rows, kept_rows)
    summary = summarize(step.states, step.input_ids, step.witness)
    for there, here in zip(vars(summary_there).values(), vars(summary).values(), strict=True):
        there.copy_(here, non_blocking=True)
    at = 0
    for rows in runs:
        for depth, rows_NH in enumerate(step.states):
            states_there[depth, at : at + rows.stop - rows.start].copy_(rows_NH[rows], non_blocking=True)
        at += rows.stop - rows.start
    return num_rows, kept_rows
