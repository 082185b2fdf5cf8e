"""The judgement of one chunk, with its audit table, and the audit of a store, as Prefect tasks."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.extract.config import Engine
from tasks.model import Checkpoint, ModelError, final_norm
from tasks.report.log import logger
from tasks.report.picture import Profiles
from tasks.report.shape_audit import audit_rows
from tasks.samples import SampleTable
from tasks.store.errors import DamagedStore
from tasks.store.reader import Reader
from tasks.verify.audit import AuditError, AuditReport, Recompute, audit, open_head
from tasks.verify.examine import Examiner
from tasks.vocabulary import Chunk, Receipt, Verdict, digest_ids


@task(name="verify", task_run_name="verify {chunk.name}", cache_policy=NO_CACHE, persist_result=False)
def verify_chunk(
    chunk: Chunk,
    receipts: dict[str, list[Receipt]],
    table: SampleTable,
    examiner: Examiner,
    profiles: Profiles,
    halt: Callable[[str], None] = lambda reason: None,
    earlier: Verdict | None = None,
) -> list[Verdict]:
    """Gather what all ranks say of each extracted sample of the chunk, and judge it.

    Args:
        chunk: its missing samples are judged.
        receipts: of all ranks, by key; emptied.
        table: the run's samples.
        examiner: of the run.
        profiles: of the run; accepted samples are added.
        halt: called with the reason when so much failed that the run should stop (:mod:`tasks.verify.gate`).
        earlier: the verdict on the first attempt, where this is the second.
    """
    ids_digests = {s.key: digest_ids(table[s.rows[0]].input_ids) for s in chunk.missing}
    verdicts = examiner.examine(chunk.missing, receipts, ids_digests)
    if earlier is not None:
        verdicts = [v if v.accepted else _second(v, earlier) for v in verdicts]
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
    if earlier is None and (reason := examiner.gate.judge(chunk.name, verdicts)):
        logger.error(f"extracting stops: {reason}")
        halt(reason)
    receipts.clear()  # the future of the extraction would hold them to the end of the run
    return [replace(v, receipts=tuple(r.without_values() for r in v.receipts)) for v in verdicts]


def _second(verdict: Verdict, first: Verdict) -> Verdict:
    before = "the same" if first.reason == verdict.reason else f"{first.reason}: {first.detail}"
    return replace(verdict, detail=f"{verdict.detail} (first attempt: {before})")


Reference = Literal["hf", "solo"]


@task(name="audit", cache_policy=NO_CACHE, persist_result=False)
def audit_store(
    reader: Reader,
    checkpoint: Checkpoint,
    samples: int | None = None,
    reference: Reference | None = None,
    engine: Engine | None = None,
) -> AuditReport:
    """Audit a store against the checkpoint that filled it.

    Args:
        reader: of the store.
        checkpoint: the tokens are proved with its norm and head.
        samples: how many samples to compare with the reference; all by default.
        reference: ``hf`` for Hugging Face's forward, ``solo`` for the engine with one sample at a time.
        engine: how to run the engine for ``solo``.
    """
    note = ""
    try:
        head = open_head(checkpoint, reader.identity)
    except ModelError as error:
        head, note = None, str(error)
    with _reference(reference, reader, checkpoint, engine or Engine()) as recompute:
        report = audit(reader, head, samples=samples, reference=reference, recompute=recompute)
    report.proof_note = note or report.proof_note
    if _has_other_norm(reader, checkpoint):
        report.store_problems.append("its final norm is not the checkpoint's")
    return report


def _has_other_norm(reader: Reader, checkpoint: Checkpoint) -> bool:
    """Whether the store's final norm, where it has one that is whole, differs from the checkpoint's."""
    try:
        stored, (weight, eps) = reader.final_norm, final_norm(checkpoint)
    except (DamagedStore, ModelError):
        return False
    return stored is not None and (stored.eps != eps or not np.array_equal(stored.weight, weight))


def _reference(name: Reference | None, reader: Reader, checkpoint: Checkpoint, engine: Engine) -> Any:
    """A context manager that gives the function to recompute states with, or None."""
    if name is not None and reader.identity.last_is_normed:
        raise AuditError("the store's last states were imported after the final norm; no reference computes those")
    if name == "solo":
        from tasks.verify.solo import Solo

        return Solo(checkpoint, reader.identity, engine)
    if name == "hf":
        from tasks.verify.reference import residual_states

        recompute: Recompute = lambda key, ids_T: residual_states(checkpoint.path, ids_T, reader.identity.depths)  # noqa: E731
        return nullcontext(recompute)
    return nullcontext(None)
