"""The judgement of one chunk as a Prefect task, with its audit table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.report.log import logger
from tasks.report.picture import Profiles
from tasks.report.shape_audit import audit_rows
from tasks.samples import SampleTable
from tasks.verify.examine import Examiner
from tasks.vocabulary import Chunk, Receipt, Verdict, digest_ids


@task(name="verify", task_run_name="verify {chunk.name}", cache_policy=NO_CACHE, persist_result=False)
def verify_chunk(
    chunk: Chunk,
    receipts: Mapping[str, Sequence[Receipt]],
    table: SampleTable,
    examiner: Examiner,
    profiles: Profiles,
    halt: Callable[[str], None] = lambda reason: None,
    earlier: Verdict | None = None,
) -> list[Verdict]:
    """Gather what all ranks say of each extracted sample of the chunk, and judge it.

    Args:
        chunk: its missing samples are judged.
        receipts: of all ranks, by key.
        table: the run's samples.
        examiner: of the run.
        profiles: of the run; accepted samples are added.
        halt: called with the reason when so much of the chunk failed that the run should stop.
        earlier: the verdict on the first attempt, where this is the second.
    """
    ids_digests = {s.key: digest_ids(table[s.rows[0]].input_ids) for s in chunk.missing}
    verdicts = examiner.examine(chunk.missing, receipts, ids_digests)
    if earlier is not None:
        verdicts = [
            v if v.accepted else replace(v, detail=f"{v.detail} (first attempt: {earlier.reason}: {earlier.detail})")
            for v in verdicts
        ]
    for verdict in verdicts:
        if verdict.accepted:
            profiles.add(verdict.receipts)
        else:
            logger.warning(f"sample {verdict.key[:12]} refused by {verdict.reason}: {verdict.detail}")
    sources = {s.key: table[s.rows[0]].source_id for s in chunk.missing}
    rows = audit_rows(
        chunk.missing, verdicts, sources, examiner.identity, examiner.audit.table_rows, retried=earlier is not None
    )
    create_table_artifact(rows, key=f"shape-audit-{chunk.name}", description="Shape audit, worst first")
    if examiner.is_systematic(verdicts):
        refused = sum(not v.accepted for v in verdicts)
        halt(f"{refused} of {len(verdicts)} samples of {chunk.name} were refused; see its audit table")
    return verdicts
