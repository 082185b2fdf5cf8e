"""What one engine step computed, read from either of vLLM's model runners.

The two runners keep the same facts in different places (V1: the persistent batch of the runner itself, V2: the
input batch of the step). This module is the only one that knows where; everything behind it sees a :class:`Step`.
The order of requests in a step is the runner's own, never that of the scheduler's dictionaries.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


class SeamError(RuntimeError):
    """vLLM no longer offers what the capture reads; the installed version is not one that was checked."""


def sample_key(request_id: str) -> str:
    """Key of a request's sample: vLLM appends "-" and 8 hex digits to the id that the request was given."""
    return request_id.rpartition("-")[0]


@dataclass(frozen=True)
class Span:
    """Rows of one request in one step."""

    request_id: str
    start: int
    """Absolute position of the first row's token in its request."""
    rows: slice
    """Where the rows stand in the step's tensors; padding lies behind the last span."""

    @property
    def key(self) -> str:
        """Of the sample."""
        return sample_key(self.request_id)


class MisshapenStep(SeamError):
    """The states of one step have another number, shape or element type than was asked for."""

    def __init__(self, message: str, spans: tuple[Span, ...], shape: tuple[int, ...], dtype: str) -> None:
        super().__init__(message)
        self.spans = spans
        self.shape = shape
        """[L, ...] of all states of the step."""
        self.dtype = dtype


@dataclass(frozen=True)
class Step:
    """One engine step: N rows over all its requests, padding trimmed."""

    spans: tuple[Span, ...]
    states: tuple[torch.Tensor, ...]
    """Per depth [N, H], views of buffers that the next step overwrites."""
    input_ids: torch.Tensor
    """[N], the token ids that were in the model's input buffer."""
    witness: tuple[torch.Tensor, ...] | None = None
    """Per depth [N, C], see :class:`tasks.extract.witness.Witness`; None if the layers were not watched."""


def read_step(model_runner: Any, depths: int) -> Step | None:
    """Read the step that ``execute_model`` has just launched; None if it ran no forward pass.

    Raises:
        SeamError: the runner keeps nothing under the names that the supported versions use.
        MisshapenStep: the model returned another number of states, or too few rows.
    """
    try:
        state = model_runner.execute_model_state
    except AttributeError as error:
        raise SeamError(f"{type(model_runner).__module__} has no execute_model_state") from error
    if state is None:
        return None
    try:
        if hasattr(state, "input_batch"):
            batch = state.input_batch
            starts, bounds = batch.num_computed_tokens_np, batch.query_start_loc_np
            input_ids = batch.input_ids
        else:
            batch = model_runner.input_batch
            starts, bounds = batch.num_computed_tokens_cpu, model_runner.query_start_loc.np
            input_ids = model_runner.input_ids.gpu
        request_ids = list(batch.req_ids)
        states = state.aux_hidden_states
    except AttributeError as error:
        raise SeamError(f"{type(model_runner).__module__} has changed: {error}") from error
    spans = tuple(
        Span(request_id, int(starts[i]), slice(int(bounds[i]), int(bounds[i + 1])))
        for i, request_id in enumerate(request_ids)
    )
    if states is None or len(states) != depths:
        found = "none" if states is None else len(states)
        raise MisshapenStep(
            f"the model returned {found} auxiliary hidden states where {depths} depths were asked for",
            spans,
            *observed(states or ()),
        )
    rows = spans[-1].rows.stop if spans else 0
    short = {int(s.shape[0]) for s in states if s.shape[0] < rows}
    if short:
        raise MisshapenStep(
            f"the model returned {sorted(short)[0]} rows where the step has {rows}: the states are split over ranks by "
            "token (sequence parallelism); turn expert parallelism or data parallelism off",
            spans,
            *observed(states),
        )
    return Step(spans, tuple(s[:rows] for s in states), input_ids[:rows])


def check_step(step: Step, depths: int, hidden_size: int, dtype: torch.dtype) -> None:
    """Refuse a step whose states are not [N, H] at each depth, of the element type asked for.

    Raises:
        MisshapenStep: says what they are.
    """
    expected = (step.input_ids.shape[0], hidden_size)
    if len(step.states) != depths or any(tuple(s.shape) != expected or s.dtype != dtype for s in step.states):
        shape, found = observed(step.states)
        raise MisshapenStep(
            f"the states of a step are {list(shape)} {found}, expected {[depths, *expected]} {dtype}",
            step.spans,
            shape,
            found,
        )


def observed(states: Sequence[torch.Tensor]) -> tuple[tuple[int, ...], str]:
    """Shape [L, ...] and element type of a step's states, as the first that is odd has them."""
    shapes = [tuple(int(n) for n in s.shape) for s in states]
    odd = min(shapes, key=shapes.count, default=())
    dtypes = [str(s.dtype).removeprefix("torch.") for s in states]
    return (len(shapes), *odd), min(dtypes, key=dtypes.count, default="none")
