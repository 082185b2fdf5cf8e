"""The plan of a run as a Prefect task."""

from dataclasses import replace

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.plan.chunks import distinct, split
from tasks.samples import SampleTable
from tasks.store.store import Store
from tasks.vocabulary import Chunk


@task(name="plan", cache_policy=NO_CACHE, persist_result=False)
def plan_chunks(table: SampleTable, store: Store, chunk_tokens: int) -> list[Chunk]:
    """Cut the table's distinct samples into chunks, each with the samples that the store lacks."""
    samples = distinct(table.keys, table.num_tokens)
    missing = set(store.missing((s.key, s.num_tokens) for s in samples))
    return [
        replace(chunk, missing=tuple(s for s in chunk.samples if s.key in missing))
        for chunk in split(samples, chunk_tokens)
    ]
