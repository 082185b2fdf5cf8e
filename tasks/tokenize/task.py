"""The tokenization of a run's data as a Prefect task."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.model import Checkpoint
from tasks.report.log import logger
from tasks.samples import SampleTable
from tasks.tokenize.config import Data
from tasks.tokenize.pipeline import tokenize
from tasks.tokenize.report import TokenizeReport
from tasks.vocabulary import Identity

LOGGED_PROBLEMS = 20


@task(name="tokenize", cache_policy=NO_CACHE, persist_result=False)
def tokenize_data(
    data: Data, checkpoint: Checkpoint, identity: Identity, max_model_len: int, directory: Path
) -> tuple[SampleTable, TokenizeReport]:
    """Tokenize all rows of the data into a table in ``directory``, and say what was skipped and why."""
    path = directory / "samples.arrow"
    report = tokenize(data, checkpoint, identity, max_model_len, path)
    for problem in report.problems[:LOGGED_PROBLEMS]:
        logger.warning(str(problem))
    return SampleTable(path), report
