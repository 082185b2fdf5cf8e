"""A shard as a Prefect task: a flow run of a deployment, which a worker on a free node picks up."""

import math
import threading
from collections.abc import Sequence
from time import monotonic
from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.events.filters import EventFilter, EventNameFilter, EventOrder, EventResourceFilter
from prefect.states import Cancelling, Completed, Crashed, Failed

from tasks.fleet.follow import ShardEnd, Sight, follow
from tasks.fleet.summary import FleetSummary
from tasks.plan.shards import Shard
from tasks.report.log import logger
from tasks.store.store import Store
from tasks.vocabulary import PlannedSample

HEARTBEAT = "prefect.flow-run.heartbeat"
RUNS_AT_ONCE = 200  # the most that the server tells of in one answer
EVENTS_AT_ONCE = 50  # the same
BEATS_EACH = 4  # are looked through, if need be, until all runs have been seen: some begin later, and clocks differ


class DeploymentNodes:
    """Runs of one deployment of the flow ``extract``; one worker per node takes them from the work pool.

    What is known of them is asked for all at once, however many follow them: a request takes the server tens of
    milliseconds of processor time, and it may share the machine with a node.
    """

    def __init__(
        self, deployment: str, parameters: dict[str, Any], *, states_s: float = 0.0, beats_s: float = 0.0
    ) -> None:
        """Issue nothing yet.

        Args:
            deployment: Name, as ``extract/kimi-k25``.
            parameters: Of the flow, without the shard.
            states_s: For so many seconds, the runs' states are taken for what they were when last asked for.
            beats_s: The same of their heartbeats.
        """
        self._deployment = deployment
        self._parameters = parameters
        self._states_s, self._beats_s = states_s, beats_s
        self._ids: dict[str, UUID] = {}
        self._lock = threading.Lock()  # of what follows
        self._states: dict[UUID, State[Any] | None] = {}
        self._beats: dict[UUID, UUID] = {}
        self._states_at = self._beats_at = -math.inf
        self._answered = False

    def issue(self, shard: Shard, attempt: int) -> str:
        run: Any = run_deployment(
            self._deployment,
            parameters=self._parameters | {"shard": shard.model_dump(mode="json")},
            flow_run_name=f"{shard.group}-{shard.name}" + (f"-again-{attempt}" if attempt > 1 else ""),
            timeout=0,
        )
        with self._lock:
            self._ids[run.name] = run.id
            self._states[run.id] = run.state
        logger.info(f"{shard.name} of {shard.count}: {run.name} waits for a free node")
        return str(run.name)

    def look(self, run: str) -> Sight | None:
        with self._lock:
            if monotonic() - self._states_at >= self._states_s:
                try:
                    self._ask()
                    self._answered = True
                except httpx.HTTPError as error:  # the server is away: it tells nothing of the nodes
                    logger.warning(f"the Prefect server does not answer: {error}")
                    self._answered = False
                self._states_at = monotonic()
            if not self._answered:
                return None
            flow_run = self._ids[run]
            if flow_run not in self._states:
                return Sight("cancelled", "its run was deleted")
            state, beat = self._states[flow_run], self._beats.get(flow_run)
        if state is None:
            return None
        return Sight(
            state.type.value.lower(),
            state.message or state.name or "",
            str(beat) if beat is not None and state.is_running() else None,
        )

    def _ask(self) -> None:
        """Ask for the states of all runs, and for the heartbeats of those that are running where they are too old."""
        runs = list(self._ids.values())
        with get_client(sync_client=True) as client:
            found: dict[UUID, State[Any] | None] = {}
            for first in range(0, len(runs), RUNS_AT_ONCE):
                of_these = FlowRunFilter(id=FlowRunFilterId(any_=runs[first : first + RUNS_AT_ONCE]))
                found |= {each.id: each.state for each in client.read_flow_runs(flow_run_filter=of_these)}
            running = [flow_run for flow_run, state in found.items() if state is not None and state.is_running()]
            if running and monotonic() - self._beats_at >= self._beats_s:
                self._ask_for_beats(client, running)
                self._beats_at = monotonic()
        self._states = found

    def _ask_for_beats(self, client: SyncPrefectClient, running: list[UUID]) -> None:
        of_runs = EventResourceFilter(id=[f"prefect.flow-run.{flow_run}" for flow_run in running])
        beats = EventFilter(event=EventNameFilter(name=[HEARTBEAT]), resource=of_runs, order=EventOrder.DESC)
        newest: dict[UUID, UUID] = {}
        page = client.read_events(beats, limit=EVENTS_AT_ONCE)
        for _ in range(2 + BEATS_EACH * len(running) // EVENTS_AT_ONCE):
            for event in page.events:
                newest.setdefault(UUID(event.resource.id.removeprefix("prefect.flow-run.")), event.id)
            if page.next_page is None or len(newest) == len(running):
                break
            page = client.read_events_page(str(page.next_page))
        self._beats |= newest

    def give_up(self, run: str, reason: str) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(
                self._ids[run], Crashed(message=f"the node is taken for dead: {reason}"), force=True
            )

    def cancel(self, run: str) -> None:
        with get_client(sync_client=True) as client:
            client.set_flow_run_state(self._ids[run], Cancelling(message="the fleet was stopped"))


@task(name="shard", task_run_name="{shard.name}", cache_policy=NO_CACHE, persist_result=False)
def run_shard(
    shard: Shard, nodes: DeploymentNodes, attempts: int, silence_seconds: float, stop: threading.Event
) -> Any:
    """Have one shard extracted by whichever nodes are free and alive.

    Returns:
        A state with a :class:`tasks.fleet.follow.ShardEnd`.
    """
    end = follow(shard, nodes, attempts=attempts, silence_s=silence_seconds, stop=stop)
    return (Completed if end.completed else Failed)(message=f"{end.state}: {end.message}", data=end)


@task(name="report fleet", cache_policy=NO_CACHE, persist_result=False)
def report_fleet(summary: FleetSummary) -> None:
    """Leave the fleet's summary where the Prefect UI shows it."""
    create_markdown_artifact(summary.markdown(), key="fleet-summary", description="What became of each shard")


def shard_end(shard: Shard, state: Any) -> ShardEnd:
    """What a shard's task has returned; or, if it broke itself, why."""
    end = state.result(raise_on_failure=False)
    return end if isinstance(end, ShardEnd) else ShardEnd(shard, "failed", str(end))


def count_missing(planned: Sequence[PlannedSample], store: Store, summary: FleetSummary) -> None:
    """Count in the store what became of samples that it lacked, and note those that it still lacks."""
    left = set(store.missing((sample.key, sample.num_tokens) for sample in planned))
    store.record()  # lists what a node committed just before it died
    store.write_failed(left)
    summary.extracted = len(planned) - len(left)
    summary.tokens = sum(sample.num_tokens for sample in planned if sample.key not in left)
    summary.left = len(left)
    summary.quarantined = len(left & store.quarantined_keys)
