"""The flow ``extract``: chats in, verified hidden states in the store."""

import tempfile
from pathlib import Path
from typing import Any

from prefect import flow, runtime
from prefect.client.schemas.objects import State
from prefect.futures import PrefectFuture, wait
from prefect.states import Completed, Failed
from prefect.task_runners import ThreadPoolTaskRunner

from flows.config import ChunkTokens, Extraction, Limit, ShuffleSeed
from flows.interrupt import standing
from flows.pause import PauseGate
from flows.run import begin
from tasks.extract.checks import check
from tasks.extract.task import LazyEngine, engine_spec, extract_chunk
from tasks.model import resolve
from tasks.plan.chunks import retries
from tasks.plan.prefixes import reuses_prefixes
from tasks.plan.shards import Shard
from tasks.plan.task import plan_chunks
from tasks.report.picture import Profiles
from tasks.report.progress import Progress
from tasks.report.summary import Summary
from tasks.report.task import progress_shown, report_run
from tasks.store.task import commit_chunk, note_failed, open_store, record_reused, require_room
from tasks.tokenize.task import tokenize_data
from tasks.verify.examine import Examiner
from tasks.verify.probe import Probe
from tasks.verify.task import verify_chunk
from tasks.vocabulary import Chunk

# Of three chunks under way one is computed, one waits inside the engine, and one is verified and committed; each
# has three tasks that wait for each other.
CHUNKS_UNDER_WAY = 3


RUNNER: Any = ThreadPoolTaskRunner(max_workers=3 * CHUNKS_UNDER_WAY)


@flow(name="extract", task_runner=RUNNER, persist_result=False)
def extract(
    extraction: Extraction,
    dataset: str | None = None,
    limit: Limit = None,
    store: str | None = None,
    chunk_tokens: ChunkTokens = None,
    force: bool = False,
    shuffle_seed: ShuffleSeed = None,
    only_failed: bool = False,
    shard: Shard | None = None,
) -> State[Any]:
    """Extract the hidden states of every sample that the store lacks.

    Args:
        extraction: What to extract, as in the presets.
        dataset: Another data file than the extraction's.
        limit: Read no more than this many rows of the data.
        store: Another store than the extraction's.
        chunk_tokens: Another chunk size than the extraction's.
        force: Begin even if the planned samples do not fit into the free space.
        shuffle_seed: Read the rows in the random order of this seed, before any limit.
        only_failed: Extract nothing but what the store's last run could not commit: failed chunks and quarantined
            samples.
        shard: Of the samples, only this part, while other runs write theirs to the same store; set by a fleet.

    Returns:
        A state with a :class:`tasks.report.summary.Summary`; Failed unless all samples are in the store.
    """
    run = begin()
    wanted = extraction.overridden(
        dataset=dataset, limit=limit, store=store, chunk_tokens=chunk_tokens, shuffle_seed=shuffle_seed
    )
    checkpoint = resolve(wanted.model)
    check(checkpoint, wanted.layers, wanted.dtype, wanted.engine)
    identity = wanted.identity(checkpoint)
    summary = Summary(store=wanted.store)
    examiner = Examiner(checkpoint, identity, wanted.engine.tensor_parallel_size, wanted.audit)
    profiles = Profiles(identity.depths)

    with (
        tempfile.TemporaryDirectory(prefix="layertap-") as scratch,
        open_store(wanted.store, identity, checkpoint, run, shard) as target,
    ):
        table, summary.input = tokenize_data(
            wanted.data, checkpoint, identity, wanted.engine.max_model_len, Path(scratch)
        )
        chunks = plan_chunks(table, target, wanted.chunk_tokens, wanted.engine.reuse_prefixes, shard, only_failed)
        summary.chunks = len(chunks)
        summary.reused = record_reused(chunks, table, target)
        wanted_samples = sum(len(chunk.samples) for chunk in chunks)
        standing(lambda: f"{summary.reused + target.committed} of {wanted_samples} samples are in the store")
        if any(chunk.missing for chunk in chunks):
            require_room(chunks, target, force)
            target.write_provenance(wanted.provenance())
        with (
            Progress(chunks) as progress,
            progress_shown(progress),
            LazyEngine(
                engine_spec(checkpoint, identity, wanted.engine, target, reuses_prefixes(chunks)),
                pause=PauseGate(runtime.flow_run.id),
                probe=Probe(checkpoint) if wanted.audit.probe else None,
                record=target.write_provenance,
            ) as engine,
        ):
            steps: list[tuple[Chunk, list[PrefectFuture[Any]]]] = []
            for chunk in chunks:
                receipts: Any = extract_chunk.submit(chunk, table, target, engine, progress)
                steps.append((chunk, [receipts]))
                if chunk.missing:
                    verdicts: Any = verify_chunk.submit(chunk, receipts, table, examiner, profiles, engine.halt)
                    commit = commit_chunk.submit(chunk, verdicts, table, target)
                    steps[-1][1].extend((verdicts, commit))
                    if not examiner.gate.is_open:  # nothing beside the first chunk until its values are proved
                        wait([verdicts])
            wait([futures[-1] for _, futures in steps])
            for chunk, futures in steps:
                failed = next((f.state for f in futures if not f.state.is_completed()), None)
                if failed is not None:
                    summary.failed_chunks[chunk.name] = str(failed.message or failed.name)
                elif chunk.missing:
                    summary.add(futures[-1].result())
            summary.halted, summary.continuation = engine.halted, engine.continuation
            summary.recomputed = engine.recomputed
            refused = [] if engine.halted else summary.quarantined
            for chunk, verdict in retries(chunks, refused, wanted.audit.max_retries):
                again: Any = extract_chunk.submit(chunk, table, target, engine, progress, suspect=True)
                second: Any = verify_chunk.submit(chunk, again, table, examiner, profiles, earlier=verdict)
                commit = commit_chunk.submit(chunk, second, table, target)
                wait([commit])
                if commit.state.is_completed():
                    summary.add_retry(commit.result(), verdict.key)
        note_failed(chunks, summary, target)
        summary.finish(progress, engine.started is not None)
        report_run(summary, profiles, run, table.num_tokens, wanted.engine.max_model_len - 1)
    return (Completed if summary.complete else Failed)(message=summary.message, data=summary)
