"""The hand-off as the flows see it: one chunk of an export or of an import, as a Prefect task each."""

from collections.abc import Sequence

import torch
from prefect import task
from prefect.artifacts import create_table_artifact
from prefect.cache_policies import NO_CACHE

from tasks.handoff.export import Export, ExportReport, Group
from tasks.handoff.formats import Format
from tasks.handoff.intake import ImportReport, Intake, Planned
from tasks.model import Checkpoint, ModelError, final_norm
from tasks.report.log import logger
from tasks.store import FinalNorm, Store
from tasks.verify.config import Audit
from tasks.verify.examine import Examiner
from tasks.verify.proof import Head

TABLE_ROWS = 500


@task(name="write", task_run_name="write chunk {number} of {total}", cache_policy=NO_CACHE, persist_result=False)
def write_chunk(export: Export, groups: Sequence[Group], number: int, total: int) -> ExportReport:
    """Write a chunk's files; each is read back and compared before it counts."""
    report = export.write(groups)
    for name, problem in report.failed.items():
        logger.warning(f"{name}: {problem}")
    return report


@task(name="take", task_run_name="take chunk {number} of {total}", cache_policy=NO_CACHE, persist_result=False)
def take_chunk(intake: Intake, files: Sequence[Planned], number: int, total: int) -> ImportReport:
    """Audit a chunk's files, and commit the good ones."""
    return intake.take(files)


def open_intake(of: Format, store: Store, checkpoint: Checkpoint, report: ImportReport) -> Intake:
    """Everything an import needs of the model; what its checkpoint lacks is noted and left out."""
    norm = head = None
    try:
        weight, eps = final_norm(checkpoint)
        norm = FinalNorm(weight, eps)
        head = Head(checkpoint, "cuda" if torch.cuda.is_available() else "cpu")
    except ModelError as error:
        report.proof_note = str(error)
        logger.warning(f"next tokens are not predicted: {error}")
    return Intake(of, store, Examiner(checkpoint, store.identity, 1, Audit()), norm, head)


def report_import(report: ImportReport) -> None:
    """Show in the UI, and say, what was refused and why."""
    for each in report.refused:
        logger.warning(f"{each.file} refused by {each.reason}: {each.detail}")
    rows = [{"file": each.file, "reason": each.reason, "detail": each.detail} for each in report.refused]
    create_table_artifact(rows[:TABLE_ROWS], key="import-refused", description=report.message)
