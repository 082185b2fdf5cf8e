"""The plan of a run as a Prefect task."""

from collections.abc import Sequence
from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.plan.chunks import distinct, split
from tasks.plan.prefixes import WORTHWHILE, arrange, known_share
from tasks.plan.shards import Shard
from tasks.report.log import logger
from tasks.samples import SampleTable
from tasks.store.store import Store
from tasks.vocabulary import Chunk, PlannedSample, ReusePrefixes


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan_chunks(
    table: SampleTable,
    store: Store,
    chunk_tokens: int,
    reuse_prefixes: ReusePrefixes = "off",
    shard: Shard | None = None,
    only_failed: bool = False,
) -> list[Chunk]:
    """Cut the table's distinct samples into chunks, each with the samples that the store lacks.

    Args:
        table: of the run's samples.
        store: where they go.
        chunk_tokens: of one chunk.
        reuse_prefixes: whether samples that begin alike stand next to each other; with ``auto``, if it is worthwhile.
        shard: plan for the samples of this shard only.
        only_failed: plan only for samples that the store's last run could not commit.
    """
    samples = distinct(table.keys, table.num_tokens)
    if shard is not None:
        samples = [sample for sample in samples if sample.key in shard]
    if only_failed:
        failed = store.failed()
        samples = [sample for sample in samples if sample.key in failed]
    missing = set(store.missing((s.key, s.num_tokens) for s in samples))

    def cut(samples: Sequence[PlannedSample], in_order: bool) -> list[Chunk]:
        return [
            replace(chunk, missing=tuple(s for s in chunk.samples if s.key in missing))
            for chunk in split(samples, chunk_tokens, in_order=in_order)
        ]

    if reuse_prefixes != "off" and missing:
        arranged = cut(arrange(samples, lambda sample: table[sample.rows[0]].input_ids), True)
        share = known_share(arranged)
        reuse = reuse_prefixes == "on" or share >= WORTHWHILE
        logger.info(f"prefixes: {share:.0%} of the tokens are known by samples before; {'' if reuse else 'not '}reused")
        if reuse:
            return arranged
    return cut(samples, False)
