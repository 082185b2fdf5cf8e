"""The way of a step's rows from the device to host memory."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol

import torch

from tasks.extract.assemble import RowSummary, summarize
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
        self._assembly.deliver(places, step.states, summarize(step.states, step.input_ids, step.witness))
        self.sent += 1

    @property
    def delivered(self) -> int:
        return self.sent

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _InFlight:
    slot: Slot
    places: list[Place]
    num_rows: int
    kept_rows: int
    arrived: Any
    """torch.cuda.Event; None where nothing is copied behind the engine's back."""
    held: tuple[Step, RowSummary]
    """What is copied from: so long as it is held, its memory is given to no other tensor."""


class SharedRing:
    """Copies steps into a ring of buffers shared with the process that assembles them.

    On a GPU: digest the rows and copy those that are kept into pinned memory on a side stream, straight from the
    tensors that the model handed out, while the engine goes on with its next step; a thread tells the other process
    once all has arrived. Nothing that the engine does waits for it but the choice of a slot, when all are in flight.
    """

    def __init__(self, process: AssemblyProcess, wants: Wants, device: torch.device, *, lent: bool = False) -> None:
        """``lent``: whether a next step may write into the tensors of this one, as a graph of kernels does."""
        self.waited = 0.0
        self.sent = 0
        self._process, self._wants, self._lent = process, wants, lent
        self._stream: Any = None
        if device.type == "cuda":
            process.pin()
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
        self._thread.start()

    def send(self, step: Step) -> None:
        began = perf_counter()
        slot = self._process.free_slot()
        self.waited += perf_counter() - began
        if self._stream is None:
            self._in_flight.put(self._copy(step, slot))
        else:
            # The runner writes the next step's ids in the same place.
            step = replace(step, input_ids=step.input_ids.clone())
            if self._lent:
                step = replace(step, states=tuple(rows_NH.clone() for rows_NH in step.states))
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                in_flight = self._copy(step, slot)
                # The thread that waits for it sleeps meanwhile, where it would else keep a core busy.
                arrived = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
                arrived.record()
            self._in_flight.put(replace(in_flight, arrived=arrived))
        self.sent += 1

    def _copy(self, step: Step, slot: Slot) -> _InFlight:
        """Copy what is wanted of a step, in the order of the current stream."""
        places, runs = self._choose(step)
        num_rows, kept_rows = step.input_ids.shape[0], sum(rows.stop - rows.start for rows in runs)
        states_there, summary_there = slot.views(num_rows, kept_rows)
        summary = summarize(step.states, step.input_ids, step.witness)
        for there, here in zip(vars(summary_there).values(), vars(summary).values(), strict=True):
            there.copy_(here, non_blocking=True)
        at = 0
        for rows in runs:
            for depth, rows_NH in enumerate(step.states):
                run_NH = rows_NH[rows]
                states_there[depth, at : at + run_NH.shape[0]].copy_(run_NH, non_blocking=True)
            at += rows.stop - rows.start
        return _InFlight(slot, places, num_rows, kept_rows, None, (step, summary))

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

    @property
    def delivered(self) -> int:
        if self._error is not None:
            raise RuntimeError("the copy of hidden states to host memory failed") from self._error
        return self._process.delivered

    def close(self) -> None:
        self._in_flight.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._in_flight.get()) is not None:
            try:
                if item.arrived is not None:
                    item.arrived.synchronize()
                self._process.deliver(item.slot, item.places, item.num_rows, item.kept_rows)
            except BaseException as error:  # reported by `delivered`, on the thread that can stop the engine
                self._error = error
            del item  # while the next one is waited for, the engine has use for its memory
