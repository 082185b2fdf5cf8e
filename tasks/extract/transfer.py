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

#: Receives (spans, states per depth [N, H], summary) of one step, all in host memory; the states of a rank that
#: keeps none are empty.
Deliver = Callable[[Sequence[Span], Sequence[torch.Tensor], RowSummary], None]


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

    def __init__(self, deliver: Deliver, *, keep_states: bool) -> None:
        self._deliver = deliver
        self._keep_states = keep_states

    def send(self, step: Step) -> None:
        summary = summarize(step.states, step.input_ids, step.witness)
        self._deliver(step.spans, step.states if self._keep_states else (), summary)

    @property
    def idle(self) -> bool:
        return True

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class _InFlight:
    spans: Sequence[Span]
    pinned: torch.Tensor | None
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
        *,
        keep_states: bool,
        slots: int,
        num_depths: int,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.waited = 0.0
        self._deliver = deliver
        self._num_depths, self._hidden_size = num_depths, hidden_size
        self._stream = torch.cuda.Stream(device=device)  # type: ignore[no-untyped-call]
        self._free: queue.SimpleQueue[torch.Tensor | None] = queue.SimpleQueue()
        for _ in range(slots):
            elements = num_depths * max_rows * hidden_size if keep_states else 0
            self._free.put(torch.empty(elements, dtype=dtype, pin_memory=True) if keep_states else None)
        self._in_flight: queue.SimpleQueue[_InFlight | None] = queue.SimpleQueue()
        self._unfinished = 0
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="layertap-transfer", daemon=True)
        self._thread.start()

    def send(self, step: Step) -> None:
        num_rows = step.input_ids.shape[0]
        on_device = summarize(step.states, step.input_ids, step.witness)
        began = perf_counter()
        pinned = self._free.get()
        self.waited += perf_counter() - began
        block_LNH = None if pinned is None else torch.stack(step.states)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            summary = RowSummary(*(_to_pinned(t, self._stream) for t in vars(on_device).values()))
            if block_LNH is not None and pinned is not None:
                pinned[: block_LNH.numel()].view_as(block_LNH).copy_(block_LNH, non_blocking=True)
                block_LNH.record_stream(self._stream)
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record(self._stream)
        with self._lock:
            self._unfinished += 1
        self._in_flight.put(_InFlight(step.spans, pinned, num_rows, summary, arrived))

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
                states: Sequence[torch.Tensor] = ()
                if item.pinned is not None:
                    used = self._num_depths * item.num_rows * self._hidden_size
                    states = tuple(item.pinned[:used].view(self._num_depths, item.num_rows, self._hidden_size))
                self._deliver(item.spans, states, item.summary)
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
