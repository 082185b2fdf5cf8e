"""The flow ``extract-fleet``: one extraction by many nodes, each with an engine of its own, into one store."""

import tempfile
import threading
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner
from pydantic import Field

from flows.config import ChunkTokens, Extraction, Limit, ShuffleSeed
from flows.run import begin
from tasks.extract.checks import check
from tasks.fleet.summary import FleetSummary
from tasks.fleet.task import DeploymentNodes, count_missing, report_fleet, run_shard, shard_end
from tasks.model import Checkpoint, resolve
from tasks.plan.shards import cut
from tasks.plan.task import plan_chunks
from tasks.report.summary import Summary
from tasks.samples import SampleTable
from tasks.store.task import open_store, record_reused, require_room
from tasks.tokenize.task import tokenize_data
from tasks.vocabulary import Chunk

LOOK_S = 4.0  # all shards are looked at together this often; a little less than each is looked at
RUNNER: Any = ThreadPoolTaskRunner(max_workers=256)  # threads that wait, one for each shard


class NoServer(RuntimeError):
    """Nodes can only be reached through a Prefect server."""


@flow(name="extract-fleet", task_runner=RUNNER, persist_result=False)
def extract_fleet(
    extraction: Extraction,
    deployment: str,
    nodes: Annotated[int, Field(ge=1, le=256)] = 2,
    dataset: str | None = None,
    limit: Limit = None,
    store: str | None = None,
    chunk_tokens: ChunkTokens = None,
    force: bool = False,
    shuffle_seed: ShuffleSeed = None,
    only_failed: bool = False,
    attempts: Annotated[int, Field(ge=1)] = 3,
    silence_seconds: Annotated[float, Field(gt=0)] = 120,
) -> State[Any]:
    """Extract the hidden states that the store lacks, on several nodes at once.

    Every node reads the same data, model and store, and is served by a worker of the deployment's work pool that
    takes one run at a time.

    Args:
        extraction: What to extract, as in the presets.
        deployment: The deployment of the flow ``extract`` that runs a shard, e.g. ``extract/kimi-k25``.
        nodes: Into how many shards the missing samples are cut; best the number of workers.
        dataset: Another data file than the extraction's.
        limit: Read no more than this many rows of the data.
        store: Another store than the extraction's.
        chunk_tokens: Another chunk size than the extraction's.
        force: Begin even if the planned samples do not fit into the free space.
        shuffle_seed: Read the rows in the random order of this seed, before any limit.
        only_failed: Extract nothing but what the store's last run could not commit.
        attempts: How often a shard is issued if its nodes die.
        silence_seconds: A node that has sent no heartbeat for so long is taken for dead.

    Returns:
        A state with a :class:`tasks.fleet.summary.FleetSummary`; Failed unless all samples are in the store.
    """
    require_server()
    wanted = extraction.overridden(
        dataset=dataset, limit=limit, store=store, chunk_tokens=chunk_tokens, shuffle_seed=shuffle_seed
    ).anchored()
    run = begin()
    checkpoint = resolve(wanted.model)
    check(checkpoint, wanted.layers, wanted.dtype, wanted.engine)
    identity = wanted.identity(checkpoint)
    summary = FleetSummary(store=wanted.store)

    with tempfile.TemporaryDirectory(prefix="layertap-") as scratch:
        _, chunks = plan_for_nodes(wanted, checkpoint, run, Path(scratch), summary, only_failed, force)
        missing = [sample for chunk in chunks for sample in chunk.missing]
        shards = cut(run, missing, nodes)
        issued = DeploymentNodes(
            deployment, shard_parameters(wanted, only_failed), states_s=LOOK_S, beats_s=silence_seconds / 8
        )
        stop = threading.Event()
        try:
            futures = [run_shard.submit(shard, issued, attempts, silence_seconds, stop) for shard in shards]
            wait(futures)
        finally:
            stop.set()
        summary.finish([shard_end(shard, future.state) for shard, future in zip(shards, futures, strict=True)])
        if missing:
            with open_store(wanted.store, identity, checkpoint, run, wait=True) as target:
                count_missing(missing, target, summary)
        report_fleet(summary)
    return (Completed if summary.complete else Failed)(message=summary.message, data=summary)


def require_server() -> None:
    """Refuse to begin without a Prefect server that other machines can reach.

    Raises:
        NoServer: says what to set.
    """
    if not get_current_settings().api.url:
        raise NoServer("the nodes report to a Prefect server: set PREFECT_API_URL to an address that they can reach")


def plan_for_nodes(
    wanted: Extraction,
    checkpoint: Checkpoint,
    run: str,
    scratch: Path,
    summary: Summary | FleetSummary,
    only_failed: bool,
    force: bool,
) -> tuple[SampleTable, list[Chunk]]:
    """The table of a run's samples and its chunks; the store is free afterwards, for the nodes to share."""
    identity = wanted.identity(checkpoint)
    with open_store(wanted.store, identity, checkpoint, run) as target:
        table, summary.input = tokenize_data(wanted.data, checkpoint, identity, wanted.engine.max_model_len, scratch)
        chunks: list[Chunk] = plan_chunks(table, target, wanted.chunk_tokens, only_failed=only_failed)
        summary.reused = record_reused(chunks, table, target)
        if any(chunk.missing for chunk in chunks):
            require_room(chunks, target, force)
            target.write_provenance(wanted.provenance())
    return table, chunks


def shard_parameters(wanted: Extraction, only_failed: bool) -> dict[str, Any]:
    """Parameters of the flow ``extract`` for every shard; each is given, since a deployment has defaults of its own."""
    return {
        "extraction": wanted.model_dump(mode="json"),
        "dataset": None,
        "limit": None,
        "store": None,
        "chunk_tokens": None,
        "force": True,  # the room for all shards was checked before
        "shuffle_seed": None,
        "only_failed": only_failed,
    }
