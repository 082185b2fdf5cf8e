"""Reading a step from both model runners, and from ones that have changed."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tasks.extract.capture import ask_for_depths
from tasks.extract.step import SeamError, read_step

ROWS, PADDED, H = 5, 8, 4
STATES = [torch.arange(PADDED * H, dtype=torch.float32).view(PADDED, H) + d for d in range(2)]
IDS = torch.arange(100, 100 + PADDED)


def v1(**changes: Any) -> Any:
    """The persistent batch of the V1 runner: arrays longer than the batch, padding behind its rows."""
    runner = {
        "execute_model_state": SimpleNamespace(aux_hidden_states=STATES),
        "input_batch": SimpleNamespace(req_ids=["b-1", "a-2"], num_computed_tokens_cpu=np.array([7, 0, 99])),
        "query_start_loc": SimpleNamespace(np=np.array([0, 2, ROWS, ROWS, ROWS])),
        "input_ids": SimpleNamespace(gpu=IDS),
    }
    return SimpleNamespace(**(runner | changes))


def v2(**changes: Any) -> Any:
    """The batch of the V2 runner's step."""
    batch = {
        "req_ids": ["b-1", "a-2"],
        "num_computed_tokens_np": np.array([7, 0]),
        "query_start_loc_np": np.array([0, 2, ROWS]),
        "input_ids": IDS,
    }
    state = SimpleNamespace(aux_hidden_states=STATES, input_batch=SimpleNamespace(**(batch | changes)))
    return SimpleNamespace(execute_model_state=state)


@pytest.mark.parametrize("runner", [v1(), v2()], ids=["V1", "V2"])
def test_both_runners_give_the_same_step(runner: Any) -> None:
    step = read_step(runner, 2)
    assert step is not None
    assert [(s.request_id, s.start, s.rows) for s in step.spans] == [
        ("b-1", 7, slice(0, 2)),
        ("a-2", 0, slice(2, 5)),
    ]
    assert [s.shape for s in step.states] == [(ROWS, H)] * 2, "padding is trimmed"
    assert step.input_ids.tolist() == [100, 101, 102, 103, 104]


def test_a_step_without_a_forward_pass_gives_nothing() -> None:
    assert read_step(v1(execute_model_state=None), 2) is None


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        (SimpleNamespace(), "has no execute_model_state"),
        (v1(query_start_loc=None), "has changed"),
        (v1(input_batch=SimpleNamespace()), "has changed"),
        (v1(execute_model_state=SimpleNamespace(aux_hidden_states=None)), "returned none .* where 2 depths"),
        (v1(execute_model_state=SimpleNamespace(aux_hidden_states=STATES[:1])), "returned 1 .* where 2 depths"),
        (
            v1(execute_model_state=SimpleNamespace(aux_hidden_states=[s[:3] for s in STATES])),
            r"3 rows where the step has 5",
        ),
    ],
)
def test_a_runner_that_has_changed_is_refused(runner: Any, message: str) -> None:
    with pytest.raises(SeamError, match=message):
        read_step(runner, 2)


def test_a_model_that_cannot_return_its_states_is_refused() -> None:
    with pytest.raises(SeamError, match="no use_aux_hidden_state_outputs"):
        ask_for_depths(SimpleNamespace(), (1,))
    runner = SimpleNamespace(use_aux_hidden_state_outputs=False, get_model=lambda: SimpleNamespace())
    with pytest.raises(SeamError, match="cannot return auxiliary hidden states"):
        ask_for_depths(runner, (1,))
