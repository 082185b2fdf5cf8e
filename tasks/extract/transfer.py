"""The way of a step's rows from the device to host memory."""

import contextlib
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from tasks.extract.assemble import summarize
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


class SharedRing:
    """Copies steps into a ring of buffers shared with the process that assembles them.

    On a GPU: clone on the main stream, copy on a side stream into pinned memory, and tell the other process from a
    thread once the copy is done. The clone is one contiguous block [L, N, H], since a strided copy halves the
    throughput. The engine waits when all buffers are in flight.
    """

    def __init__(self, process: AssemblyProcess, wants: Wants, device: torch.device) -> None:
        self.waited = 0.0
        self.sent = 0
        self._process, self._wants = process, wants
        self._stream: Any = None
        if device.type == "cuda":
            process.pin()
            self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
        self._thread.start()

    def send(self, step: Step) -> None:
        on_device = summarize(step.states, step.input_ids, step.witness)
        began = perf_counter()
        slot = self._process.free_slot()
        self.waited += perf_counter() - began
        places, block_LNH = self._gather(step)
        num_rows = step.input_ids.shape[0]
        kept_rows = 0 if block_LNH is None else block_LNH.shape[1]
        states_LNH, summary = slot.views(num_rows, kept_rows)
        arrived = None
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            for there, here in zip(vars(summary).values(), vars(on_device).values(), strict=True):
                self._copy(there, here)
            if block_LNH is not None:
                self._copy(states_LNH, block_LNH)
            if self._stream is not None:
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
        self.sent += 1
        self._in_flight.put(_InFlight(slot, places, num_rows, kept_rows, arrived))

    def _copy(self, there: torch.Tensor, here: torch.Tensor) -> None:
        there.copy_(here, non_blocking=True)
        if self._stream is not None:
            here.record_stream(self._stream)

    def _gather(self, step: Step) -> tuple[list[Place], torch.Tensor | None]:
        """The rows that this rank keeps, cloned into one block [L, n, H]."""
        places: list[Place] = []
        kept: list[Span] = []
        num_rows = 0
        for span in step.spans:
            if self._wants(span):
                count = span.rows.stop - span.rows.start
                places.append((span, slice(num_rows, num_rows + count)))
                kept.append(span)
                num_rows += count
            else:
                places.append((span, None))
        if num_rows == 0:
            return places, None
        if num_rows == step.input_ids.shape[0]:
            return places, torch.stack(step.states)
        block_LNH = step.states[0].new_empty(len(step.states), num_rows, step.states[0].shape[1])
        for depth, rows_NH in enumerate(step.states):
            torch.cat([rows_NH[span.rows] for span in kept], out=block_LNH[depth])
        return places, block_LNH

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
