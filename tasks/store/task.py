"""The store as the flow sees it: opened for a run, and the commit of one chunk as a Prefect task."""

from collections.abc import Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.faults import RETRIES
from tasks.model import Checkpoint, final_norm
from tasks.plan.shards import Shard
from tasks.report.log import logger
from tasks.report.summary import Outcome, Summary
from tasks.samples import SampleTable
from tasks.store.backend import Share
from tasks.store.final_norm import FinalNorm
from tasks.store.maintenance import preflight
from tasks.store.store import SourceRecord, StagedSample, Store
from tasks.vocabulary import Chunk, Identity, PlannedSample, Verdict

# A node that died may hold its share of an object store this long, and shards that begin at once wait for each other.
SHARE_WAIT_S = 180.0


def open_store(
    url: str, identity: Identity, checkpoint: Checkpoint, run: str, shard: Shard | None = None, wait: bool = False
) -> Store:
    """Open or create the store for this run, or for one of several that fill it together; a context manager.

    Args:
        url: of the store.
        identity: of its samples.
        checkpoint: that fills it.
        run: name of the run.
        shard: Share the store with the others of the shard's group.
        wait: Wait a while for others to let go of the store, as a shard always does.
    """
    weight, eps = final_norm(checkpoint)
    store = Store.open(
        url,
        identity,
        run=run,
        share=Share(shard.group, shard.name) if shard else None,
        final_norm=FinalNorm(weight, eps),
        wait_s=SHARE_WAIT_S if shard or wait else 0.0,
    )
    if store.rebuilt is not None:
        logger.warning(
            f"the manifest of {store.url} was damaged and is rebuilt from the samples: {store.rebuilt.samples} are "
            f"listed, {store.rebuilt.added} of them again"
        )
    return store


def record_reused(chunks: Sequence[Chunk], table: SampleTable, store: Store) -> int:
    """Let new source ids of samples that are in the store already resolve to them; returns how many samples."""
    missing = {sample.key for chunk in chunks for sample in chunk.missing}
    reused = [sample for chunk in chunks for sample in chunk.samples if sample.key not in missing]
    _record_sources(reused, table, store)
    return len(reused)


def require_room(chunks: Sequence[Chunk], store: Store, force: bool) -> None:
    """Refuse a run whose missing samples do not fit into the store's free space.

    Raises:
        NoSpace: says how much is needed, in all and per 1M tokens.
    """
    missing = [sample for chunk in chunks for sample in chunk.missing]
    largest = max(sum(sample.num_tokens for sample in chunk.missing) for chunk in chunks)
    tokens = sum(sample.num_tokens for sample in missing)
    room = preflight(store, tokens, len(missing), chunk_tokens=largest, force=force)
    logger.info(f"room in {store.url}: {room}")


def note_failed(chunks: Sequence[Chunk], summary: Summary, store: Store) -> None:
    """Note which samples this run was asked for and did not commit, for a run over only those."""
    quarantined = [verdict.key for verdict in summary.quarantined]
    lost = [s.key for chunk in chunks if chunk.name in summary.failed_chunks for s in chunk.missing]
    store.write_failed([*quarantined, *lost])


@task(name="commit", task_run_name="commit {chunk.name}", cache_policy=NO_CACHE, persist_result=False, **RETRIES)
def commit_chunk(chunk: Chunk, verdicts: Sequence[Verdict], table: SampleTable, store: Store) -> Outcome:
    """Commit the accepted samples, quarantine the others, and record the sources of those committed."""
    planned = {sample.key: sample for sample in chunk.missing}
    accepted = [verdict for verdict in verdicts if verdict.accepted]
    refused = [verdict for verdict in verdicts if not verdict.accepted]
    staged = [_staged(planned[verdict.key], verdict, table) for verdict in accepted]
    store.commit(staged)
    for verdict in refused:
        sources = [table[row].source_id for row in planned[verdict.key].rows]
        evidence = [receipt.to_evidence() for receipt in verdict.receipts]
        store.quarantine(verdict.key, sources, verdict.reason or "", verdict.detail, evidence)
    _record_sources([planned[verdict.key] for verdict in accepted], table, store)
    return Outcome(
        extracted=len(staged),
        tokens=sum(sample.num_tokens for sample in staged),
        state_bytes=sum(store.spec.nbytes(sample.num_tokens) for sample in staged),
        stored_bytes=sum(size for sample in staged for size, _ in sample.objects.values()),
        reused_rows=sum(rows for verdict in accepted for rows in verdict.receipts[0].reused_from.values()),
        refused=refused,
    )


def _record_sources(samples: Sequence[PlannedSample], table: SampleTable, store: Store) -> None:
    rows = (table[row] for sample in samples for row in sample.rows if row not in table.nameless)
    store.record(SourceRecord(row.source_id, row.key, row.loss_mask) for row in rows)


def _staged(sample: PlannedSample, verdict: Verdict, table: SampleTable) -> StagedSample:
    receipt = next(r for r in verdict.receipts if r.objects is not None)
    named = [table[row] for row in sample.rows if row not in table.nameless]
    return StagedSample(
        key=sample.key,
        num_tokens=sample.num_tokens,
        objects=receipt.objects or {},
        loss_mask=(named or [table[sample.rows[0]]])[0].loss_mask,
        next_token=receipt.next_token,
        sources={row.source_id: row.loss_mask for row in named},
        # Left with the sample, so that it can be audited later without the engine.
        capture={
            "digests": receipt.digests,
            "rms": receipt.rms,
            "ranks": receipt.world_size,
            **({"reused": receipt.reused_from} if receipt.reused else {}),
        },
    )
