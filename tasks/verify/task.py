"""The judgement of one chunk as a Prefect task."""

from collections.abc import Mapping, Sequence

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.extract.config import Engine
from tasks.samples import SampleTable
from tasks.verify.config import Audit
from tasks.verify.judge import Case, judge
from tasks.vocabulary import Chunk, Identity, Receipt, Verdict, digest_ids


@task(name="verify", task_run_name="verify {chunk.name}", cache_policy=NO_CACHE, persist_result=False)
def verify_chunk(
    chunk: Chunk,
    receipts: Mapping[str, Sequence[Receipt]],
    table: SampleTable,
    identity: Identity,
    engine: Engine,
    audit: Audit,
) -> list[Verdict]:
    """Judge each extracted sample of the chunk by the receipts of all ranks."""
    return [
        judge(
            Case(
                identity=identity,
                planned=sample,
                ids_digest=digest_ids(table[sample.rows[0]].input_ids),
                world_size=engine.tensor_parallel_size,
                receipts=receipts.get(sample.key, ()),
                audit=audit,
            )
        )
        for sample in chunk.missing
    ]
