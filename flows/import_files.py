"""The flow ``import``: existing extractions of another project, audited, into a store."""

from pathlib import Path
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.run import begin
from tasks.handoff.export import described_aux
from tasks.handoff.formats import by_name
from tasks.handoff.intake import ImportReport, identity_of
from tasks.handoff.task import open_intake, report_import, take_chunk
from tasks.model import Model, resolve
from tasks.paths import from_home
from tasks.store.task import open_store

Origin = Literal["speculators", "specforge", "model-optimizer"]


@flow(name="import", persist_result=False)
def import_files(
    directory: Path,
    store: str,
    origin: Origin,
    model: str,
    depths: tuple[int, ...] | None = None,
    chunk_tokens: int = 65_536,
    force: bool = False,
) -> State[Any]:
    """Audit the files of another project, and commit the good ones to a store.

    Args:
        directory: Where the files are.
        store: Directory or URL of the store; new, or of an earlier import of the same kind of files.
        origin: Whose files they are.
        model: The checkpoint that their states come from.
        depths: Auxiliary depths that the files hold; by default what an export says of its files, or the project's own.
        chunk_tokens: Tokens of one chunk: what one task run audits and commits.
        force: Begin even if the samples may not fit into the free space.

    Returns:
        A state with a :class:`tasks.handoff.intake.ImportReport`; Failed if any file was refused.
    """
    run = begin()
    checkpoint = resolve(Model(path=model))
    of = by_name(origin)
    files = of.scan(directory)
    identity = identity_of(of, files, checkpoint, depths or described_aux(directory))
    report = ImportReport(store)
    with open_store(store, identity, checkpoint, run) as target:
        intake = open_intake(of, target, checkpoint, report)
        chunks = list(intake.chunks(intake.plan(files, report), chunk_tokens))
        if chunks:
            intake.require_room(chunks, force)
            imported = {"from": origin, "files": len(files)}
            target.write_provenance({"model": {"path": from_home(model)}, "imported": imported})
        for number, chunk in enumerate(chunks, 1):
            report.add(take_chunk(intake, chunk, number, len(chunks)))
    report_import(report)
    return (Completed if report.passed else Failed)(message=report.message, data=report)
