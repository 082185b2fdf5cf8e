"""Which faults are tried again."""

from types import SimpleNamespace

import pytest

from tasks.extract.engine import EngineClosed, EngineDied
from tasks.extract.task import Halted, extract_chunk
from tasks.faults import may_pass
from tasks.store.errors import DamagedSample, NoSpace, StorageFailure, StoreError
from tasks.store.task import commit_chunk
from tasks.verify.task import verify_chunk
from tasks.vocabulary import StagingFailure


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (EngineDied("its process ended"), True),
        (StorageFailure("the object store is out of reach"), True),
        (StagingFailure("a disk error", lasting=False), True),
        (ConnectionResetError("by peer"), True),
        (TimeoutError("no answer"), True),
        (StorageFailure("the disk is full", lasting=True), False),
        (EngineClosed("the run ends"), False),
        (Halted("too many samples were refused"), False),
        (StoreError("a staged file has another size"), False),
        (DamagedSample("00", "short"), False),
        (NoSpace("too little room"), False),
        (ValueError("states have shape [512]"), False),
        (ArithmeticError("NaN"), False),
        (AssertionError("a fault of this program"), False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_only_what_may_pass_is_tried_again(fault: Exception, expected: bool) -> None:
    assert may_pass(None, None, SimpleNamespace(data=fault)) is expected


def test_the_tasks_that_meet_such_faults_are_those_that_are_tried_again() -> None:
    for task in (extract_chunk, commit_chunk):
        assert task.retries == 3
        assert task.retry_condition_fn is may_pass
        delays = task.retry_delay_seconds
        assert isinstance(delays, list)
        assert delays == sorted(set(delays)), "each wait is longer than the one before"
        assert task.retry_jitter_factor
    assert verify_chunk.retries == 0, "a verdict does not get better by asking again"
