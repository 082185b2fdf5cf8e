"""The way of a step's rows from the device to host memory."""

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
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

    def make_way(self) -> None:
        """The engine begins with its next step, which may overwrite the states of the one before."""

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

    def make_way(self) -> None:
        pass

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

    On a GPU: digest the rows and clone those that are kept on one side stream, copy the clone into pinned memory on
    another, and tell the other process from a thread once the copy is done. Digests and clone run while the engine
    samples tokens and plans its next step; that step's kernels wait for them. The clone is one contiguous block
    [L, N, H], since a strided copy halves the throughput. The engine waits when all buffers are in flight.
    """

    def __init__(self, process: AssemblyProcess, wants: Wants, device: torch.device) -> None:
        self.waited = 0.0
        self.sent = 0
        self._process, self._wants = process, wants
        self._streams: tuple[Any, Any] | None = None
        """Of torch.cuda: one that reads the engine's tensors, and one that copies to host memory."""
        self._reading: tuple[Step, Any] | None = None
        """The step that is being read, and the torch.cuda.Event after which it no longer is."""
        if device.type == "cuda":
            process.pin()
            self._streams = torch.cuda.Stream(device=device), torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
        self._thread.start()

    def make_way(self) -> None:
        if self._reading is not None:
            _, read = self._reading
            torch.cuda.current_stream().wait_event(read)
            self._reading = None  # only now may its memory be given to other tensors

    def send(self, step: Step) -> None:
        began = perf_counter()
        slot = self._process.free_slot()
        self.waited += perf_counter() - began
        if self._streams is None:
            places, summary, block_LNH = self._read(step)
        else:
            reader, copier = self._streams
            reader.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(reader):
                places, summary, block_LNH = self._read(step)
            self._reading = step, reader.record_event()
            copier.wait_stream(reader)
        num_rows = step.input_ids.shape[0]
        kept_rows = 0 if block_LNH is None else block_LNH.shape[1]
        states_there, summary_there = slot.views(num_rows, kept_rows)
        copies = list(zip(vars(summary_there).values(), vars(summary).values(), strict=True))
        if block_LNH is not None:
            copies.append((states_there, block_LNH))
        arrived = None
        if self._streams is None:
            _copy(copies)
        else:
            with torch.cuda.stream(copier):
                _copy(copies)
            for _, here in copies:
                here.record_stream(copier)
            arrived = copier.record_event()
        self.sent += 1
        self._in_flight.put(_InFlight(slot, places, num_rows, kept_rows, arrived))

    def _read(self, step: Step) -> tuple[list[Place], RowSummary, torch.Tensor | None]:
        """What is wanted of a step, in tensors of its own; the rows that are kept are [L, n, H]."""
        places, block_LNH = self._gather(step)
        return places, summarize(step.states, step.input_ids, step.witness), block_LNH

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


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for there, here in copies:
        there.copy_(here, non_blocking=True)
