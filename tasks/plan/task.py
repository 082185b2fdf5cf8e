"""The plan of a run as a Prefect task."""

from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.plan.chunks import distinct, split
from tasks.plan.shards import Shard
from tasks.samples import SampleTable
from tasks.store.store import Store
from tasks.vocabulary import Chunk


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan_chunks(
    table: SampleTable, store: Store, chunk_tokens: int, shard: Shard | None = None, only_failed: bool = False
) -> list[Chunk]:
    """Cut the table's distinct samples into chunks, each with the samples that the store lacks.

    Args:
        table: of the run's samples.
        store: where they go.
        chunk_tokens: of one chunk.
        shard: Plan for the samples of this shard only.
        only_failed: Plan for samples only that the store's last run could not commit.
    """
    samples = distinct(table.keys, table.num_tokens)
    if shard is not None:
        samples = [sample for sample in samples if sample.key in shard]
    if only_failed:
        failed = store.failed()
        samples = [sample for sample in samples if sample.key in failed]
    missing = set(store.missing((s.key, s.num_tokens) for s in samples))
    return [
        replace(chunk, missing=tuple(s for s in chunk.samples if s.key in missing))
        for chunk in split(samples, chunk_tokens)
    ]
