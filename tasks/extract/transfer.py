"""The way of a step's rows from the device to host memory."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch

from tasks.extract.assemble import RowSummary, summarize
from tasks.extract.step import Span, Step

#: A request's rows of a step, and where its states stand in what is delivered; None if this rank does not keep them.
Place = tuple[Span, slice | None]

#: Receives the places, the states per depth [N, H] and the summary of one step, all in host memory.
Deliver = Callable[[Sequence[Place], Sequence[torch.Tensor], RowSummary], None]

#: Whether this rank keeps the states of a request's rows.
Keeps = Callable[[Span], bool]


class Transfer(Protocol):
    """Takes steps in order and delivers them in order."""

    waited: float
    """Seconds that the engine has waited for room."""

    def send(self, step: Step) -> None: ...

    @property
    def idle(self) -> bool:
        """Whether everything sent was delivered. Raises what went wrong on the way."""

    def close(self) -> None: ...


class DirectTransfer:
    """For a CPU: the states are in host memory already and are delivered before the next step can overwrite them."""

    waited = 0.0

    def __init__(self, deliver: Deliver, keeps: Keeps) -> None:
        self._deliver = deliver
        self._keeps = keeps

    def send(self, step: Step) -> None:
        places = [(span, span.rows if self._keeps(span) else None) for span in step.spans]
        self._deliver(places, step.states, summarize(step.states, step.input_ids, step.witness))

    @property
    def idle(self) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _InFlight:
    places: Sequence[Place]
    pinned: torch.Tensor
    num_rows: int
    summary: RowSummary
    arrived: Any  # torch.cuda.Event


class PinnedRing:
    """For a GPU: clone on the main stream, copy on a side stream into pinned buffers, deliver from a thread.

    The clone is one contiguous block [L, N, H], since a strided copy halves the throughput. The engine waits when
    all buffers are in flight.
    """

    def __init__(
        self,
        deliver: Deliver,
        keeps: Keeps,
        *,
        slots: int,
        num_depths: int,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.waited = 0.0
        self.delivering = 0.0
        """Seconds that the thread has spent on placing rows in samples' memory."""
        self._deliver, self._keeps = deliver, keeps
        self._num_depths, self._hidden_size = num_depths, hidden_size
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
        for _ in range(slots):
            self._free.put(torch.empty(num_depths * max_rows * hidden_size, dtype=dtype, pin_memory=True))
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
        self._thread.start()

    def send(self, step: Step) -> None:
        on_device = summarize(step.states, step.input_ids, step.witness)
        began = perf_counter()
        pinned = self._free.get()
        self.waited += perf_counter() - began
        places, block_LNH = self._gather(step)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            summary = RowSummary(*(_to_pinned(t, self._stream) for t in vars(on_device).values()))
            if block_LNH is not None:
                pinned[: block_LNH.numel()].view_as(block_LNH).copy_(block_LNH, non_blocking=True)
                block_LNH.record_stream(self._stream)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        with self._lock:
            self._unfinished += 1
        num_rows = 0 if block_LNH is None else block_LNH.shape[1]
        self._in_flight.put(_InFlight(places, pinned, num_rows, summary, arrived))

    def _gather(self, step: Step) -> tuple[list[Place], torch.Tensor | None]:
        """The rows that this rank keeps, cloned into one block [L, n, H]."""
        places: list[Place] = []
        num_rows = 0
        for span in step.spans:
            count = span.rows.stop - span.rows.start
            kept = self._keeps(span)
            places.append((span, slice(num_rows, num_rows + count) if kept else None))
            num_rows += count if kept else 0
        if num_rows == 0:
            return places, None
        if num_rows == step.input_ids.shape[0]:
            return places, torch.stack(step.states)
        kept_rows = [span.rows for span, place in places if place is not None]
        block_LNH = step.states[0].new_empty(self._num_depths, num_rows, self._hidden_size)
        for depth, rows_NH in enumerate(step.states):
            torch.cat([rows_NH[rows] for rows in kept_rows], out=block_LNH[depth])
        return places, block_LNH

    @property
    def idle(self) -> bool:
        if self._error is not None:
            raise RuntimeError("the copy of hidden states to host memory failed") from self._error
        with self._lock:
            return self._unfinished == 0

    def close(self) -> None:
        self._in_flight.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._in_flight.get()) is not None:
            try:
                item.arrived.synchronize()
                used = self._num_depths * item.num_rows * self._hidden_size
                states = tuple(item.pinned[:used].view(self._num_depths, item.num_rows, self._hidden_size))
                began = perf_counter()
                self._deliver(item.places, states, item.summary)
                self.delivering += perf_counter() - began
            except BaseException as error:  # reported by `idle`, on the thread that can stop the engine
                self._error = error
            self._free.put(item.pinned)
            with self._lock:
                self._unfinished -= 1


def _to_pinned(tensor: torch.Tensor, stream: Any) -> torch.Tensor:
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    pinned.copy_(tensor, non_blocking=True)
    tensor.record_stream(stream)
    return pinned
