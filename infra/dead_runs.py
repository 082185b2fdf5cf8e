"""Mark as Crashed what a machine's worker had under way, and whose process is gone.

A worker that is told to end kills its run, which then cannot say so; and who lost the server or the machine had nobody
to say it to. The automation in ``infra/automations.yaml`` does not see such a run: its heartbeats stopped before the
server was there to miss them. Here a machine's own processes tell.

.. code-block:: bash

    .venv/bin/python -m infra.dead_runs WORKER [SECONDS]
"""

import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.states import Crashed

from flows.doctor import POOL

UNDER_WAY = [StateType.RUNNING, StateType.CANCELLING]


def mark(worker: str, seconds: float = 0.0, pool: str = POOL) -> list[str]:
    """Mark the runs of a worker of this machine, which is not running any more; gives their names.

    Args:
        worker: its name.
        seconds: for so long, wait for runs that are about to end.
        pool: that it works for.
    """
    marked = []
    deadline = time.monotonic() + seconds
    with get_client(sync_client=True) as client:
        while True:
            runs = _under_way(client, worker, pool)
            ended = [run for run in runs if not _is_there(run)]
            for run in ended:
                state = client.read_flow_run(run.id).state  # it may have said its last word since
                if state is not None and state.type in UNDER_WAY:
                    crashed: State[Any] = Crashed(message="its process ended with the worker, or with the machine")
                    client.set_flow_run_state(run.id, crashed, force=True)
                    marked.append(run.name)
            if len(ended) == len(runs) or time.monotonic() > deadline:
                return marked
            time.sleep(1)


def _under_way(client: SyncPrefectClient, worker: str, pool: str) -> list[FlowRun]:
    runs = client.read_flow_runs(
        work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[pool])),
        flow_run_filter=FlowRunFilter(state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))),
    )
    return [run for run in runs if run.labels.get("prefect.worker.name") == worker and run.infrastructure_pid]


def _is_there(run: FlowRun) -> bool:
    """Whether the process is one of this run; its number may have come to be another's."""
    pid = str(run.infrastructure_pid).rpartition(":")[2]
    with suppress(FileNotFoundError, ProcessLookupError):
        with suppress(PermissionError):
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return f"PREFECT__FLOW_RUN_ID={UUID(str(run.id))}".encode() in environment
        return True  # another user's: not known to be gone
    return False


if __name__ == "__main__":
    worker, *seconds = sys.argv[1:]
    for name in mark(worker, sum(map(float, seconds))):
        print(f"[deploy] {name} is marked as Crashed; run it again to go on", file=sys.stderr)
