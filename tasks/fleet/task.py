"""A shard as a Prefect task: a flow run of a deployment, which a worker on a free node picks up."""

import threading
from collections.abc import Sequence
from typing import Any
from uuid import UUID

import httpx
from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.deployments import run_deployment
from prefect.events.filters import EventFilter, EventNameFilter, EventOrder, EventResourceFilter
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Completed, Crashed, Failed

from tasks.fleet.follow import ShardEnd, Sight, follow
from tasks.fleet.summary import FleetSummary
from tasks.plan.shards import Shard
from tasks.report.log import logger
from tasks.store.store import Store
from tasks.vocabulary import PlannedSample

HEARTBEAT = "prefect.flow-run.heartbeat"


class DeploymentNodes:
    """Runs of one deployment of the flow ``extract``; one worker per node takes them from the work pool."""

    def __init__(self, deployment: str, parameters: dict[str, Any]) -> None:
        """Issue nothing yet.

        Args:
            deployment: Name, as ``extract/kimi-k25``.
            parameters: Of the flow, without the shard.
        """
        self._deployment = deployment
        self._parameters = parameters
        self._ids: dict[str, UUID] = {}

    def issue(self, shard: Shard, attempt: int) -> str:
        run: Any = run_deployment(
            self._deployment,
            parameters=self._parameters | {"shard": shard.model_dump(mode="json")},
            flow_run_name=f"{shard.group}-{shard.name}" + (f"-again-{attempt}" if attempt > 1 else ""),
            timeout=0,
        )
        self._ids[run.name] = run.id
        logger.info(f"{shard.name} of {shard.count}: {run.name} waits for a free node")
        return str(run.name)

    def look(self, run: str) -> Sight | None:
        try:
            with get_client(sync_client=True) as client:
                state = client.read_flow_run(self._ids[run]).state
                if state is None:
                    return None
                of_run = EventResourceFilter(id=[f"prefect.flow-run.{self._ids[run]}"])
                beats = EventFilter(event=EventNameFilter(name=[HEARTBEAT]), resource=of_run, order=EventOrder.DESC)
                newest = client.read_events(beats, limit=1).events if state.is_running() else []
        except ObjectNotFound:
            return Sight("cancelled", "its run was deleted")
        except httpx.HTTPError as error:  # the server is away: it tells nothing of the nodes
            logger.warning(f"{run}: the Prefect server does not answer: {error}")
            return None
        return Sight(state.type.value.lower(), state.message or state.name or "", str(newest[0].id) if newest else None)

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
