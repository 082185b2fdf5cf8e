"""The tokenization of a run's data as a Prefect task."""

from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from tasks.model import Checkpoint
from tasks.report.log import logger
from tasks.samples import SampleTable
from tasks.tokenize.config import Data
from tasks.tokenize.pipeline import tokenize
from tasks.tokenize.report import LIST_ALL, TokenizeReport
from tasks.vocabulary import Identity

LOGGED = 20  # rows that are named, of each kind of problem


@task(name="tokenize", cache_policy=NO_CACHE, persist_result=False)
def tokenize_data(
    data: Data, checkpoint: Checkpoint, identity: Identity, max_model_len: int, directory: Path
) -> tuple[SampleTable, TokenizeReport]:
    """Tokenize all rows of the data into a table in ``directory``, and say what was skipped and why.

    Raises:
        TokenizeError: see :func:`tasks.tokenize.pipeline.tokenize`; or no row gives a sample.
    """
    path = directory / "samples.arrow"
    report = tokenize(data, checkpoint, identity, max_model_len, path)
    for problem in report.problems[:LOGGED]:
        logger.warning(str(problem))
    if (more := sum(report.skipped.values()) - LOGGED) > 0:
        logger.warning(f"and {more:,} more input rows are skipped; {LIST_ALL}")
    for shared in report.shared_ids[:LOGGED]:
        logger.warning(str(shared))
    if (more := report.ids_used_twice - LOGGED) > 0:
        logger.warning(f"and {more:,} more ids stand for different contents")
    for fields, count in report.unread.items():
        logger.warning(f"not read in {count:,} input rows: {fields}, which counts; leave out whichever should not")
    report.require_samples(data.place)
    return SampleTable(path), report
