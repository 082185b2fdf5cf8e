"""A worker whose samples come out wrong in every way that captures are known to go wrong.

The faults are scripted by the length of a sample, in an environment variable: ``{length: [fault, ...]}``. They
are made where they happen in the world: in what the model computes (hooks on its layers), in what is read of a step,
on the way to host memory, in assembly, in staging, and in what a rank reports. No check knows of them.
"""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from tasks.extract.assembly import Assembly, Wanted
from tasks.extract.cpu_worker import CpuCaptureWorker
from tasks.extract.step import Span, Step
from tasks.store.stage import stage_states
from tasks.vocabulary import Receipt

SCRIPT = "LAYERTAP_TEST_FAULTS"


def script() -> dict[int, str]:
    """Length -> fault."""
    return {int(n): fault for n, fault in json.loads(os.environ.get(SCRIPT, "{}")).items()}


def stage(directory: Any, key: str, spec: Any, states_LTH: Any, input_ids: Any, executor: Any) -> Any:
    if script().get(states_LTH.shape[1]) == "disk full":
        raise OSError(28, "No space left on device")
    return stage_states(directory, key, spec, states_LTH, input_ids, executor)


class FaultyWorker(CpuCaptureWorker):
    """The CPU worker, with faults."""

    def load_model(self, **kwargs: Any) -> None:
        super().load_model(**kwargs)
        self._faults: dict[str, str] = {}
        self._attempts: dict[str, int] = {}
        self._residual: dict[int, torch.Tensor] = {}
        self._alone: dict[int, torch.Tensor] = {}
        self._normed = torch.empty(0)
        self._elsewhere: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        stack = self.model_runner.get_model().model
        for depth, layer in enumerate(stack.layers):
            layer.register_forward_pre_hook(self._look(depth, 1))
        stack.layers[1].register_forward_pre_hook(self._disturb)
        stack.norm.register_forward_pre_hook(self._look(len(stack.layers), 0))
        stack.norm.register_forward_hook(self._keep_normed)

    # --- in the model

    def _look(self, depth: int, first: int) -> Any:
        def look(_module: Any, args: tuple[Any, ...]) -> None:
            hidden, residual = args[first], args[first + 1]
            self._alone[depth] = hidden.clone()
            self._residual[depth] = hidden.clone() if residual is None else hidden + residual

        return look

    def _keep_normed(self, _module: Any, _args: Any, output: Any) -> None:
        self._normed = output[0].clone()

    def _disturb(self, _module: Any, args: tuple[Any, ...]) -> None:
        """Change what the model itself computes from here on, for the rows of some samples."""
        for request_id, rows in self._rows_now():
            match self._fault(request_id):
                case "NaN from the model":
                    args[1][rows] = torch.nan
                case "numbers far too large":
                    args[1][rows] *= 300
                case "partial sums of one rank" if self._last_of_several:
                    args[1][rows] += args[1][rows].roll(1, dims=1) / 4

    def _rows_now(self) -> list[tuple[str, slice]]:
        runner = self.model_runner
        bounds = runner.query_start_loc.np
        ids = list(runner.input_batch.req_ids)
        return [(request_id, slice(int(bounds[i]), int(bounds[i + 1]))) for i, request_id in enumerate(ids)]

    @property
    def _last_of_several(self) -> bool:
        return bool(self.rank == self.vllm_config.parallel_config.tensor_parallel_size - 1 > 0)

    def _fault(self, request_id: str) -> str:
        key = request_id.rpartition("-")[0]
        fault = self._faults.get(key, "")
        return "" if fault.endswith(" once") and self._attempts[key] > 1 else fault

    # --- in what is read of a step

    def _read_step(self) -> Step | None:
        step = super()._read_step()
        if step is None or not self._open:
            return step
        step = replace(step, states=tuple(s.clone() for s in step.states), input_ids=step.input_ids.clone())
        for span in step.spans:
            self._elsewhere.pop(span.request_id, None)
            rows_LNH = torch.stack(step.states)[:, span.rows]
            self._elsewhere[span.request_id] = (rows_LNH, step.input_ids[span.rows].clone())
        faults = [(self._fault(span.request_id), place) for place, span in enumerate(step.spans)]
        # What changes the step as a whole comes last; the others need its rows as they are.
        for fault, place in sorted(faults, key=lambda f: f[0] in WHOLE_STEP):
            if fault in STEP_FAULTS:
                step = STEP_FAULTS[fault](self, step, place)
        return step

    def foreign(self, request_id: str, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [L, n, H] and ids [n] of another request that was computed before."""
        states, ids = next(rows for other, rows in reversed(self._elsewhere.items()) if other != request_id)
        rows = torch.arange(num_rows) % ids.shape[0]
        return states[:, rows], ids[rows]

    # --- on the way to host memory, in assembly and in what is reported

    def layertap_open(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        told = super().layertap_open(*args, **kwargs)
        assembly = self._assembly
        assert isinstance(assembly, Assembly)
        complete, deliver = assembly.assembler.on_complete, assembly.deliver

        def on_complete(sample: Any) -> None:
            if self._faults.get(sample.key) == "rows never written" and sample.states_LTH is not None:
                sample.states_LTH[:, 3:5] = torch.nan  # as the buffer was before
            complete(sample)

        def faulty_deliver(places: Any, arrived: Any) -> None:
            for span, state_rows in places:
                fault = self._fault(span.request_id)
                if state_rows is not None and fault in HOST_FAULTS:
                    arrived = arrived._replace(states=tuple(rows_NB.copy() for rows_NB in arrived.states))
                    states, dtype = map(torch.from_numpy, arrived.states), assembly.assembler.dtype
                    HOST_FAULTS[fault](tuple(rows_NB.view(dtype) for rows_NB in states), state_rows)
            deliver(places, arrived)

        send = assembly.outbox.receipt

        def lose(receipt: Receipt, digests: Any) -> None:
            if self._faults.get(receipt.key) != "no receipt from a rank" or self.rank != 0:
                send(receipt, digests)

        assembly.outbox.receipt = lose  # type: ignore[method-assign]
        assembly.assembler.on_complete = on_complete
        assembly.deliver = faulty_deliver  # type: ignore[method-assign]
        return told

    def _expect(self, wanted: list[Wanted]) -> None:
        for sample in wanted:
            self._attempts[sample.key] = self._attempts.get(sample.key, 0) + 1
            if sample.num_tokens in script():
                self._faults[sample.key] = script()[sample.num_tokens]
        super()._expect(wanted)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        for i, request_id in enumerate(getattr(output, "req_ids", ())):
            if self._fault(request_id) == "states of another prompt's end" and output.sampled_token_ids[i]:
                output.sampled_token_ids[i] = [(output.sampled_token_ids[i][0] + 7) % 256]
        return output


# --- the faults of a step: (worker, step, place of the sample's span) -> step

StepFault = Callable[[FaultyWorker, Step, int], Step]


def _rows(change: Callable[[FaultyWorker, list[torch.Tensor], slice], None]) -> StepFault:
    """A fault that changes the sample's rows of the states in place."""

    def fault(worker: FaultyWorker, step: Step, place: int) -> Step:
        rows = step.spans[place].rows
        if rows.stop - rows.start > 4:  # a sample's first or last few rows may be in another step than the others
            change(worker, list(step.states), rows)
        return step

    return fault


def _span(change: Callable[[Span], Span]) -> StepFault:
    def fault(worker: FaultyWorker, step: Step, place: int) -> Step:
        spans = [*step.spans]
        spans[place] = change(spans[place])
        return replace(step, spans=tuple(spans))

    return fault


def _states(change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> StepFault:
    return lambda worker, step, place: replace(step, states=tuple(change(list(step.states))))


def _all_foreign(worker: FaultyWorker, step: Step, place: int) -> Step:
    rows = step.spans[place].rows
    states, ids = worker.foreign(step.spans[place].request_id, rows.stop - rows.start)
    for depth, rows_NH in enumerate(step.states):
        rows_NH[rows] = states[depth]
    step.input_ids[rows] = ids
    return step


def _foreign_states(worker: FaultyWorker, step: Step, place: int) -> Step:
    rows = step.spans[place].rows
    states, _ = worker.foreign(step.spans[place].request_id, rows.stop - rows.start)
    for depth, rows_NH in enumerate(step.states):
        rows_NH[rows] = states[depth]
    return step


def _from(what: Callable[[FaultyWorker, int], torch.Tensor]) -> StepFault:
    """The states of other layers, or of another place in the same layers."""

    def change(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
        for rows_NH, depth in zip(states, worker._depths, strict=True):
            rows_NH[rows] = what(worker, depth)[rows]

    return _rows(change)


def _last_normed(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    states[-1][rows] = worker._normed[rows]


def _last_dropped(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    states[-1][rows] = worker._residual[worker._depths[-1] - 1][rows]


def _partial(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    if worker.vllm_config.parallel_config.tensor_parallel_size == 1:  # with more, the model itself is disturbed
        for rows_NH in states:
            rows_NH[rows] /= 2


def _bit(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    if worker._last_of_several:
        states[1][rows.start + 2, 8] = torch.nextafter(states[1][rows.start + 2, 8], torch.tensor(9.0))


def _set(value: float, last: int) -> StepFault:
    def change(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
        for rows_NH in states:
            rows_NH[rows.stop - last : rows.stop] = value

    return _rows(change)


def _repeat(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    for rows_NH in states:
        rows_NH[rows.stop - 3 : rows.stop] = rows_NH[rows.stop - 4].clone()


def _shift(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    for rows_NH in states:
        rows_NH[rows] = rows_NH[rows].roll(1, dims=0)


def _exchange(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    states[0][rows], states[1][rows] = states[1][rows].clone(), states[0][rows].clone()


def _carry(worker: FaultyWorker, states: list[torch.Tensor], rows: slice) -> None:
    states[1][rows.start : rows.start + 3] = states[0][rows.start : rows.start + 3]


STEP_FAULTS: dict[str, StepFault] = {
    "rows of one request under another": _all_foreign,
    "rows of one request under another's tokens": _foreign_states,
    "one layer too deep": _from(lambda w, k: w._residual[k + 1 if k < 5 else k]),
    "one layer too shallow": _from(lambda w, k: w._residual[k - 1]),
    "residual not added": _from(lambda w, k: w._alone[k]),
    "partial sums of one rank": _rows(_partial),
    "token-sharded states": _states(lambda states: [s[: -(-s.shape[0] // 2)] for s in states]),
    "cached prefix rows missing": _span(
        lambda s: replace(s, start=s.start + 8, rows=slice(s.rows.start + 8, s.rows.stop))
    ),
    "rows of padding": _set(0.0, 2),
    "rows of padding that repeat": _rows(_repeat),
    "NaN from the capture": _set(torch.nan, 1),
    "a layer less": _states(lambda states: states[:-1]),
    "last layer dropped": _rows(_last_dropped),
    "final norm applied": _rows(_last_normed),
    "one capture per prefill chunk": _span(lambda s: replace(s, start=0)),
    "hidden axis lost": _states(lambda states: [s.norm(dim=1) for s in states]),
    "another element type": _states(lambda states: [s.bfloat16() for s in states]),
    "one bit of one rank": _rows(_bit),
    "one bit of one rank once": _rows(_bit),
    "rows shifted by one": _rows(_shift),
    "two depths exchanged": _rows(_exchange),
    "rows carried to the next depth": _rows(_carry),
}


WHOLE_STEP = ("token-sharded states", "a layer less", "hidden axis lost", "another element type")


def _overwrite(states: tuple[torch.Tensor, ...], rows: slice) -> None:
    for rows_NH in states:
        rows_NH[rows] = rows_NH[rows].flip(0)


def _zero_block(states: tuple[torch.Tensor, ...], rows: slice) -> None:
    states[-1][rows.start : rows.start + 4] = 0


def _flip(states: tuple[torch.Tensor, ...], rows: slice) -> None:
    row = states[1][rows.start + 2]
    row[7] = torch.nextafter(row[7], torch.tensor(9.0))


HOST_FAULTS: dict[str, Callable[[tuple[torch.Tensor, ...], slice], None]] = {
    "static buffer overwritten by the next step": _overwrite,
    "zeros from an unwritten block": _zero_block,
    "one bit on the way": _flip,
}
