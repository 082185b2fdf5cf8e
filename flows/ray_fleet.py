"""The flow ``extract-ray``: one extraction by all nodes of a Ray cluster, chunk by chunk, into one store.

The task of a chunk is a thread here that waits for an actor. Run by prefect-ray's task runner, it would be one more
process on a node of Ray's choice, which only passes the chunk on; and if that node died, the actor that it had chosen
on another node would be lost to all others.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect import flow, runtime, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.futures import wait
from prefect.settings import get_current_settings
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.config import ChunkTokens, Extraction, Limit, ShuffleSeed
from flows.fleet import plan_for_nodes, require_server
from flows.node import Node, Parcel
from flows.pause import PauseGate
from flows.run import begin
from tasks.extract.checks import check
from tasks.faults import RETRIES
from tasks.fleet.pool import NodeDied, NoNodes, Pool
from tasks.model import Checkpoint, resolve
from tasks.plan.chunks import retries
from tasks.plan.shards import Shard
from tasks.report.picture import Profiles
from tasks.report.progress import Progress
from tasks.report.summary import Outcome, Summary
from tasks.report.task import progress_shown, report_run
from tasks.samples import SampleTable
from tasks.store.task import note_failed, open_store
from tasks.vocabulary import Chunk, Identity, Verdict

CHUNKS_PER_NODE = 3  # as in a run on one node: computed, waiting inside the engine, and verified and committed

RUNNER: Any = ThreadPoolTaskRunner(max_workers=64)  # threads that wait for nodes: enough for 20 of them


@dataclass(frozen=True)
class RayNode:
    """An actor that holds the engine of one node."""

    name: str
    actor: Any
    shard: Shard
    """The share of the store under which it writes."""

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of :class:`flows.node.Node` there.

        Raises:
            NodeDied: the actor or its machine is gone.
        """
        import ray

        try:
            return ray.get(getattr(self.actor, method).remote(*arguments))
        except ray.exceptions.RayActorError as error:
            raise NodeDied(f"{self.name}: {str(error).splitlines()[0]}") from error


@task(name="extract", task_run_name="extract {chunk.name}", cache_policy=NO_CACHE, persist_result=False, **RETRIES)
def extract_on_a_node(
    chunk: Chunk,
    table: SampleTable,
    pool: Pool[RayNode],
    progress: Progress,
    gate: PauseGate,
    earlier: Verdict | None = None,
) -> Any:
    """Have a chunk extracted, verified and committed by a free node; by another if that dies.

    Returns:
        A state with the chunk's :class:`tasks.report.summary.Outcome` and the reason why the run should stop, if any;
        named Cached when nothing was missing.
    """
    reused = len(chunk.samples) - len(chunk.missing)
    if not chunk.missing:
        return Completed(name="Cached", message=f"{reused}/{reused} verified in store", data=None)
    parcel = Parcel.pack(chunk, table, earlier)

    tried: list[str] = []

    def work(node: RayNode) -> tuple[RayNode, Outcome, str | None]:
        gate()
        progress.engine_ready()
        tried.append(node.name)
        again = len(tried) > 1 or (runtime.task_run.run_count or 0) > 1
        return node, *node.call("run", parcel, again)

    node, outcome, halted = pool.run(work)
    for sample in chunk.missing:
        progress.advance(sample.key, sample.num_tokens)
    return Completed(message=f"{outcome.extracted} extracted on {node.name}, {reused} reused", data=(outcome, halted))


@flow(name="extract-ray", task_runner=RUNNER, persist_result=False)
def extract_ray(
    extraction: Extraction,
    dataset: str | None = None,
    limit: Limit = None,
    store: str | None = None,
    chunk_tokens: ChunkTokens = None,
    force: bool = False,
    shuffle_seed: ShuffleSeed = None,
    only_failed: bool = False,
) -> State[Any]:
    """Extract the hidden states that the store lacks, on every node of the Ray cluster that ``RAY_ADDRESS`` names.

    Each node with enough GPUs (or, on CPUs, with a free one) holds one engine. Every node reaches the model and the
    store under the same paths; the data is read here only.

    Args:
        extraction: What to extract, as in the presets.
        dataset: Another data file than the extraction's.
        limit: Read no more than this many rows of the data.
        store: Another store than the extraction's.
        chunk_tokens: Another chunk size than the extraction's.
        force: Begin even if the planned samples do not fit into the free space.
        shuffle_seed: Read the rows in the random order of this seed, before any limit.
        only_failed: Extract nothing but what the store's last run could not commit.

    Returns:
        A state with a :class:`tasks.report.summary.Summary`; Failed unless all samples are in the store.
    """
    require_server()
    wanted = extraction.overridden(
        dataset=dataset, limit=limit, store=store, chunk_tokens=chunk_tokens, shuffle_seed=shuffle_seed
    ).anchored()
    run = begin()
    checkpoint = resolve(wanted.model)
    check(checkpoint, wanted.layers, wanted.dtype, wanted.engine)
    identity = wanted.identity(checkpoint)
    summary = Summary(store=wanted.store)
    profiles = Profiles(identity.depths)

    with tempfile.TemporaryDirectory(prefix="layertap-") as scratch:
        table, chunks = plan_for_nodes(wanted, checkpoint, run, Path(scratch), summary, only_failed, force)
        summary.chunks = len(chunks)
        missing = any(chunk.missing for chunk in chunks)
        with (
            Progress(chunks) as progress,
            progress_shown(progress),
            nodes_for(wanted, checkpoint, identity, run, missing) as pool,
        ):
            gate = PauseGate(runtime.flow_run.id)
            futures = [(chunk, extract_on_a_node.submit(chunk, table, pool, progress, gate)) for chunk in chunks]
            wait([future for _, future in futures])
            for chunk, future in futures:
                if not future.state.is_completed():
                    summary.failed_chunks[chunk.name] = str(future.state.message or future.state.name)
                elif chunk.missing:
                    outcome, halted = future.result()
                    summary.add(outcome)
                    summary.halted = summary.halted or halted
            refused = [] if summary.halted else summary.quarantined
            for chunk, verdict in retries(chunks, refused, wanted.audit.max_retries):
                again = extract_on_a_node.submit(chunk, table, pool, progress, gate, verdict)
                again.wait()
                if again.state.is_completed():
                    summary.add_retry(again.result()[0], verdict.key)
            for node in pool.alive:
                for profile in node.call("profiles"):
                    profiles.add_profile(profile)
        if missing:
            with open_store(wanted.store, identity, checkpoint, run, wait=True) as target:
                note_failed(chunks, summary, target)
        summary.finish(progress, missing)
        report_run(summary, profiles, run, table.num_tokens, wanted.engine.max_model_len - 1)
    return (Completed if summary.complete else Failed)(message=summary.message, data=summary)


@contextmanager
def nodes_for(
    wanted: Extraction, checkpoint: Checkpoint, identity: Identity, run: str, needed: bool
) -> Iterator[Pool[RayNode]]:
    """One named actor on each node of the cluster that can hold the engine; they end with the run.

    Raises:
        NoNodes: the cluster has no such node.
    """
    if not needed:
        yield Pool([], CHUNKS_PER_NODE)
        return
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if not ray.is_initialized():
        ray.init(log_to_driver=False)
    size = wanted.engine.tensor_parallel_size
    of_gpus = any(node["Resources"].get("GPU") for node in ray.nodes())
    wants = {"num_gpus": size} if of_gpus else {"num_cpus": 1}
    found = [
        node
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU" if of_gpus else "CPU", 0) >= (size if of_gpus else 1)
    ]
    if not found:
        raise NoNodes(f"the Ray cluster has no node with {size} GPUs" if of_gpus else "the Ray cluster has no CPU free")
    environment = {"PREFECT_API_URL": str(get_current_settings().api.url)}
    nodes: list[RayNode] = []
    try:
        for index, node in enumerate(found):
            shard = Shard(group=run, index=index, count=len(found))
            name = f"{run}-node-{index:03d}"
            actor = (
                ray.remote(Node)
                .options(
                    **wants,
                    name=name,
                    max_concurrency=CHUNKS_PER_NODE + 1,
                    runtime_env={"env_vars": environment | {"LAYERTAP_NODE": f"ray-{node['NodeID'][:12]}"}},
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
                )
                .remote(wanted.model_dump(mode="json"), shard.model_dump(), name)
            )
            nodes.append(RayNode(name, actor, shard))
        yield Pool(
            _ready(nodes),
            CHUNKS_PER_NODE,
            bury=lambda node: open_store(wanted.store, identity, checkpoint, f"{run}-bury", node.shard).close(),
        )
    finally:
        _end(nodes)


def _ready(nodes: Sequence[RayNode]) -> list[RayNode]:
    """Those that came up."""
    ready = []
    reason: NodeDied | None = None
    for node in nodes:
        try:
            node.call("pid")
        except NodeDied as error:
            reason = error
        else:
            ready.append(node)
    if not ready:
        raise NoNodes(f"no node of the Ray cluster came up: {reason}") from reason
    return ready


def _end(nodes: Sequence[RayNode]) -> None:
    import ray

    for node in nodes:
        with suppress(ray.exceptions.RayError):
            ray.get(node.actor.close.remote(), timeout=120)
        ray.kill(node.actor)
