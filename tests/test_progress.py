"""What is counted while a run is going, and how often it is shown."""

import time
from itertools import pairwise
from typing import Any

import pytest

from tasks.report import task
from tasks.report.progress import Progress
from tasks.report.task import progress_shown
from tasks.vocabulary import Chunk, PlannedSample

MISSING = tuple(PlannedSample(f"{n:064x}", 10 * n, (n,)) for n in (1, 2, 3, 4))
CHUNK = Chunk("chunk-0000-abcdef", MISSING, MISSING)


def test_a_sample_that_is_computed_again_counts_once() -> None:
    with Progress([CHUNK]) as progress:
        assert progress.percent == 0
        for sample in (MISSING[3], MISSING[3], MISSING[0]):
            progress.advance(sample.key, sample.num_tokens)
        assert (progress.samples, progress.tokens, progress.percent) == (2, 50, 50.0)
        assert progress.line().startswith("2/4 samples, 50/100 tokens, ")


def test_where_nothing_is_missing_all_is_done() -> None:
    assert Progress([Chunk("chunk-0000-abcdef", MISSING)]).percent == 100.0


def test_the_ui_is_told_seldom_and_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[float, float]] = []
    monkeypatch.setattr(task, "PROGRESS_SECONDS", 0.2)
    monkeypatch.setattr(task, "create_progress_artifact", lambda percent, **_: told.append((time.monotonic(), percent)))

    def update(_artifact: Any, percent: float, **_: Any) -> None:
        told.append((time.monotonic(), percent))

    monkeypatch.setattr(task, "update_progress_artifact", update)
    many = tuple(PlannedSample(f"{n:064x}", 1, (n,)) for n in range(500))
    with Progress([Chunk("chunk-0000-abcdef", many, many)]) as progress, progress_shown(progress):
        for sample in many:
            progress.advance(sample.key, sample.num_tokens)
            time.sleep(0.001)
    assert told[0][1] == 0
    assert told[-1][1] == 100.0
    assert all(later - earlier > 0.15 for (earlier, _), (later, _) in pairwise(told[:-1]))
    assert 3 <= len(told) <= 7


def test_a_server_that_is_away_does_not_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_: Any, **__: Any) -> None:
        raise ConnectionError("no server")

    monkeypatch.setattr(task, "create_progress_artifact", lambda *_, **__: None)
    monkeypatch.setattr(task, "update_progress_artifact", away)
    with Progress([CHUNK]) as progress, progress_shown(progress):
        progress.advance(MISSING[0].key, 10)
