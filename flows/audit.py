"""The flow ``audit``: a store, read from disk and proved against the checkpoint that filled it."""

from pathlib import Path
from typing import Any

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.run import begin
from tasks.extract.config import Engine
from tasks.model import Model, resolve
from tasks.report.task import report_audit
from tasks.store import Reader
from tasks.store import open as open_store
from tasks.verify.audit import AuditError
from tasks.verify.task import Reference, audit_store


@flow(name="audit", persist_result=False)
def audit(
    store: str,
    model: str | None = None,
    reference: Reference | None = None,
    samples: int | None = None,
    html: Path = Path("audit.html"),
) -> State[Any]:
    """Audit a store.

    Args:
        store: Directory or URL of the store.
        model: The checkpoint that filled it; by default the one that the store's newest run names.
        reference: Recompute states and compare: `hf` by Hugging Face's forward, `solo` by the engine, one at a time.
        samples: How many samples to recompute; all by default.
        html: Where the report goes.

    Returns:
        A state with a :class:`tasks.verify.audit.AuditReport`; Failed if anything is wrong.
    """
    begin()
    reader = open_store(store)
    run = newest_run(reader)
    if model is None and "model" not in run:
        raise AuditError(f"no run of {store} says which checkpoint filled it; name it with --model")
    checkpoint = resolve(Model(path=model) if model is not None else Model.model_validate(run["model"]))
    engine = Engine.model_validate(run.get("engine", {}))
    report = audit_store(reader, checkpoint, samples, reference, engine)
    report_audit(report, html)
    message = "; ".join([f"{len(report.samples)} samples, {len(report.failed)} with problems", *report.store_problems])
    return (Completed if report.passed else Failed)(message=message, data=report)


def newest_run(reader: Reader) -> dict[str, Any]:
    """Provenance of the newest run that filled the store; empty if none says how."""
    return next((run for run in reversed(list(reader.runs())) if "model" in run), {})
