"""A flow run as seen from its own process: where it is shown, whom it belongs to, and that its records arrive."""

import os
import signal
import time
from functools import cache
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import get_current_settings
from prefect.states import Crashed

from tasks.processes import Process
from tasks.report.log import logger

SETTLE_SECONDS = 30.0
"""How long the end of a process waits for a server of its own to write everything down."""
UNCHANGED_SECONDS = 1.5  # longer than the server keeps records back, see flush_interval in pyproject.toml


def begin() -> str:
    """What every flow does first: say where the run is shown, and tie it to its worker. Returns the run's name."""
    _end_with_worker()
    if runtime.flow_run.id and (address := page(runtime.flow_run.id)):
        logger.info(f"this run: {address}")
    return str(runtime.flow_run.name or "run")


def page(flow_run: UUID | str) -> str | None:
    """Address of the run's page; None where a server is started for the run only, which has no pages."""
    settings = get_current_settings()
    if not settings.api.url:
        return None
    base = str(settings.ui_url or settings.api.url.removesuffix("/api")).rstrip("/")
    # The current UI; without this part, Prefect opens the old one.
    return f"{base.removesuffix('/v2')}/v2/runs/flow-run/{flow_run}"


@cache
def _end_with_worker() -> None:
    """End this run, as if it were told to, when the worker that started it is gone.

    Nobody could cancel the run any more, and the next worker on this machine would start a second engine beside it. A
    run that a person started is left alone.
    """
    # Set by Prefect in processes that it starts for one flow run each.
    flow_run = os.environ.get("PREFECT__FLOW_RUN_ID")
    if flow_run is None:
        return

    def end() -> None:
        try:
            # After a signal alone, a run whose worker is gone was seen to stay Running.
            with get_client(sync_client=True) as client:
                crashed: State[Any] = Crashed(message="the worker that started this run is gone")
                client.set_flow_run_state(UUID(flow_run), crashed, force=True)
        except Exception as error:
            logger.warning(f"the server could not be told that the worker is gone: {error}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)  # the flow's context managers shut the engine down

    Process(os.getppid()).when_gone(end)


def settle(flow_run: UUID) -> None:
    """Wait until a server that ends with this process has written down the run's tasks, logs and events."""
    if get_current_settings().api.url:
        return  # a server of its own life loses nothing
    deadline = time.monotonic() + SETTLE_SECONDS
    EventsWorker.drain_all(timeout=SETTLE_SECONDS)
    APILogWorker.drain_all(timeout=SETTLE_SECONDS)
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run]))
    with get_client(sync_client=True) as client:
        seen, since = -1, time.monotonic()
        while time.monotonic() < deadline:
            runs = client.read_task_runs(flow_run_filter=this_run)
            ended = sum(run.state is not None and run.state.is_final() for run in runs)
            if ended != seen:
                seen, since = ended, time.monotonic()
            elif ended == len(runs) and time.monotonic() - since > UNCHANGED_SECONDS:
                return
            time.sleep(0.2)
    logger.warning("some records of this run may be missing: its server did not write them down in time")
