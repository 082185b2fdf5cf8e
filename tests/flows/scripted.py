"""The flow ``extract`` as a deployment of the tests runs it: with the stage of tests.flows.killers."""

from typing import Any

import tasks.extract.task
from flows.extract import extract
from tests.flows import killers

__all__ = ["extract"]

tasks.extract.task.STAGE = f"{killers.__name__}:stage"
tasks.extract.task.extract_chunk.retry_delay_seconds = 1  # what comes of a retry is tested, not the wait before it
_exit = tasks.extract.task.LazyEngine.__exit__


def _exit_and_say_so(self: Any, *error: Any) -> None:
    killers.ending().touch()
    _exit(self, *error)


tasks.extract.task.LazyEngine.__exit__ = _exit_and_say_so  # type: ignore[method-assign]
