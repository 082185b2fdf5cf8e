"""The reports of a run and of an audit as Prefect tasks."""

import contextvars
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from prefect import task
from prefect.artifacts import (
    create_image_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.cache_policies import NO_CACHE

from tasks.report.audit_page import lines, page, picture, rows
from tasks.report.lengths import draw_lengths
from tasks.report.log import logger
from tasks.report.picture import Profiles, data_uri, draw
from tasks.report.progress import Progress
from tasks.report.summary import Summary, markdown_table
from tasks.verify.audit import AuditReport

PROGRESS_SECONDS = 10.0  # between two updates of what the UI shows, as between two lines in the log


@contextmanager
def progress_shown(progress: Progress) -> Iterator[None]:
    """Show a run's progress on its page in the Prefect UI until the context ends."""
    artifact: Any = create_progress_artifact(progress.percent, key="extraction-progress", description=progress.line())
    ended = threading.Event()

    def show() -> None:
        shown = progress.line()
        last = False
        while not last:
            last = ended.wait(PROGRESS_SECONDS)
            if (line := progress.line()) != shown:
                try:
                    update_progress_artifact(artifact, progress.percent, description=line)
                    shown = line
                except Exception as error:  # a server that is away for a moment costs a picture, not the run
                    logger.warning(f"the progress cannot be shown: {error}")

    # Prefect's settings, the server's address among them, belong to the context.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(show,), name="layertap-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report_run(
    summary: Summary, profiles: Profiles, run: str, num_tokens: npt.NDArray[np.int32], max_tokens: int
) -> None:
    """Leave the run's summary and its pictures where the Prefect UI shows them.

    Args:
        summary: of the run.
        profiles: of the accepted samples.
        run: its name.
        num_tokens: [samples], the lengths of all samples of the input.
        max_tokens: the length at which samples are cut.
    """
    create_markdown_artifact(summary.markdown(), key="extraction-summary", description=f"What became of {run}")
    if profiles.kept:
        picture = data_uri(draw(profiles, run))
        create_image_artifact(picture, key="state-sizes", description="Row RMS over token position, outliers marked")
    if len(num_tokens):
        with tempfile.TemporaryDirectory(prefix="layertap-") as directory:
            path = Path(directory) / "lengths.png"
            draw_lengths(num_tokens, path, max_tokens)
            lengths = data_uri(path.read_bytes())
        create_image_artifact(lengths, key="sample-lengths", description="Lengths of the samples in tokens")


@task(name="report audit", cache_policy=NO_CACHE, persist_result=False)
def report_audit(report: AuditReport, path: Path) -> None:
    """Leave an audit's table, summary and picture in the Prefect UI, and all of them in one HTML file."""
    path.write_text(page(report), encoding="utf-8")
    verdict = "passed" if report.passed else "failed"
    create_markdown_artifact(f"**{verdict}**\n\n{markdown_table(lines(report))}", key="store-audit-summary")
    create_table_artifact(rows(report), key="store-audit", description="Audit of the store, worst first")
    if (image := picture(report)) is not None:
        create_image_artifact(image, key="store-state-sizes", description="Row RMS over token position")
