"""Pausing a run between chunks, from the command line or through Prefect's API."""

from collections.abc import Callable
from datetime import UTC, datetime
from time import sleep
from typing import Any
from uuid import UUID, uuid4

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.flow_runs import resume_flow_run
from prefect.states import Paused

from tasks.report.log import logger

POLL_S = 2.0


class PauseError(RuntimeError):
    """A run cannot be paused or resumed, or was not resumed in time."""


class PauseGate:
    """Lets chunks through to the engine unless their run is paused.

    What the engine has already begun is finished, verified and committed meanwhile; the engine stays loaded.
    """

    def __init__(self, flow_run: UUID | str | None) -> None:
        self._flow_run = None if flow_run is None else UUID(str(flow_run))

    def __call__(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Return at once, or when the run was resumed, or has ended while it was paused.

        Raises:
            PauseError: the run was not resumed in the time that the pause allows.
        """
        if self._flow_run is None:
            return
        told = False
        with get_client(sync_client=True) as client:
            while (
                not ended() and (state := client.read_flow_run(self._flow_run).state) is not None and state.is_paused()
            ):
                if state.state_details.pause_reschedule:
                    return  # suspended: Prefect itself ends this process and starts another when it is resumed
                limit = state.state_details.pause_timeout
                if limit is not None and datetime.now(UTC) > limit:
                    raise PauseError("the run was paused and not resumed in time; run it again")
                if not told:
                    logger.info("paused: no further chunk is begun until the run is resumed")
                    told = True
                sleep(POLL_S)
        if told and not ended():
            logger.info("resumed")


def pause(run: str, timeout_s: int | None = None) -> FlowRun:
    """Pause a run, by name or id; it keeps its engine and begins no further chunk until it is resumed.

    Raises:
        PauseError: there is no such run, or it is not running.
    """
    found = find(run)
    with get_client(sync_client=True) as client:
        state: State[Any] = Paused(timeout_seconds=timeout_s, reschedule=False, pause_key=str(uuid4()))
        answer = client.set_flow_run_state(found.id, state)
    if answer.status != SetStateStatus.ACCEPT:
        raise PauseError(f"{found.name} cannot be paused: it is {found.state_name}")
    return found


def resume(run: str) -> FlowRun:
    """Let a paused run go on.

    Raises:
        PauseError: there is no such run, or it is not paused.
    """
    found = find(run)
    try:
        resume_flow_run(found.id)
    except Exception as error:
        raise PauseError(f"{found.name} cannot be resumed: {error}") from error
    return found


def find(run: str) -> FlowRun:
    """The newest run of this name, or the one with this id.

    Raises:
        PauseError: there is none.
    """
    with get_client(sync_client=True) as client:
        try:
            return client.read_flow_run(UUID(run))
        except ValueError:
            named = FlowRunFilter(name=FlowRunFilterName(any_=[run]))
            found = client.read_flow_runs(flow_run_filter=named)
    if not found:
        raise PauseError(f"the Prefect server knows no run {run}; is PREFECT_API_URL set to the server of the run?")
    return max(found, key=lambda each: each.created or datetime.min.replace(tzinfo=UTC))
