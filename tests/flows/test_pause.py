"""The gate before the engine: open, closed while the run is paused, and in the way of nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
from prefect import flow, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.states import Paused, Running, Suspended

from flows.pause import PauseError, PauseGate, pause, resume

pytestmark = pytest.mark.usefixtures("prefect_server")


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What happens at each poll of a closed gate; the list is used up."""
    script: list[Callable[[], None]] = []
    monkeypatch.setattr("flows.pause.sleep", lambda seconds: script.pop(0)())
    return script


def run(steps: Callable[[str, PauseGate], None]) -> Any:
    """A flow run that takes the steps, given its name and its gate."""

    @flow(name="steps")
    def steps_in_a_run() -> None:
        steps(str(runtime.flow_run.name), PauseGate(runtime.flow_run.id))

    return steps_in_a_run(return_state=True)


def test_a_paused_run_waits_until_it_is_resumed(polls: list[Callable[[], None]]) -> None:
    log: list[str] = []

    def steps(name: str, gate: PauseGate) -> None:
        gate()
        log.append("first")
        assert pause(name).name == name
        polls.extend([lambda: log.append("poll"), lambda: log.append("poll"), lambda: void(resume(name))])
        gate()
        log.append("second")
        with pytest.raises(PauseError, match="cannot be resumed"):
            resume(name)

    def void(_: object) -> None:
        log.append("resumed")

    assert run(steps).is_completed()
    assert log == ["first", "poll", "poll", "resumed", "second"]
    assert polls == []


def test_a_pause_that_was_too_long_ends_the_run() -> None:
    def steps(name: str, gate: PauseGate) -> None:
        with get_client(sync_client=True) as client:
            state: State[Any] = Paused(timeout_seconds=0, reschedule=False)
            client.set_flow_run_state(runtime.flow_run.id, state)
        gate()

    state = run(steps)
    assert state.is_failed()


def test_a_paused_run_that_ends_waits_no_longer(polls: list[Callable[[], None]]) -> None:
    ended: list[bool] = []

    def steps(name: str, gate: PauseGate) -> None:
        pause(name)
        polls.append(lambda: ended.append(True))
        gate(lambda: bool(ended))
        resume(name)

    assert run(steps).is_completed()
    assert ended == [True]


def test_a_suspended_run_is_left_to_prefect(polls: list[Callable[[], None]]) -> None:
    def steps(name: str, gate: PauseGate) -> None:
        suspended: State[Any] = Suspended()
        running: State[Any] = Running()
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(runtime.flow_run.id, suspended, force=True)
            gate()
            client.set_flow_run_state(runtime.flow_run.id, running, force=True)

    assert run(steps).is_completed()
    assert polls == []


def test_only_a_run_that_is_there_and_running_can_be_paused() -> None:
    names: list[str] = []
    assert run(lambda name, gate: names.append(name)).is_completed()
    with pytest.raises(PauseError, match=f"{names[0]} cannot be paused: it is Completed"):
        pause(names[0])
    with pytest.raises(PauseError, match="knows no run no-such-run"):
        pause("no-such-run")


def test_without_a_run_the_gate_is_open() -> None:
    PauseGate(None)()
