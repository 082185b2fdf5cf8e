"""The report of a run as a Prefect task: one summary and one picture."""

from prefect import task
from prefect.artifacts import create_image_artifact, create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from tasks.report.picture import Profiles, data_uri, draw
from tasks.report.summary import Summary


@task(name="report", cache_policy=NO_CACHE, persist_result=False)
def report_run(summary: Summary, profiles: Profiles, run: str) -> None:
    """Leave the run's summary and its picture where the Prefect UI shows them."""
    create_markdown_artifact(summary.markdown(), key="extraction-summary", description=f"What became of {run}")
    if profiles.kept:
        picture = data_uri(draw(profiles, run))
        create_image_artifact(picture, key="state-sizes", description="Row RMS over token position, outliers marked")
