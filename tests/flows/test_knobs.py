"""What a person can do to a run: pause and resume it, and run only what failed."""

import time
from pathlib import Path
from typing import Any

import pytest

from flows.extract import extract
from flows.pause import PauseError, pause, resume
from tasks.report.summary import Summary
from tasks.store import StagedSample, Store
from tasks.store import open as open_store
from tests.flows import faults
from tests.flows.test_extract import extraction, write
from tests.flows.test_fleet import LENGTHS
from tests.flows.test_fleet import extraction as many_chunks

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]


def run(*arguments: Any, **knobs: Any) -> tuple[Any, Summary]:
    state: Any = extract(*arguments, return_state=True, **knobs)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    return state, summary


def test_a_paused_run_finishes_what_it_has_begun_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Store.commit
    commits: list[str] = []
    before_resume: list[int] = []
    polls = 0

    def commit(store: Store, samples: list[StagedSample]) -> list[str]:
        committed = original(store, samples)
        commits.append(store.run)
        if len(commits) == 1:
            pause(store.run)
        return committed

    def poll(seconds: float) -> None:
        nonlocal polls
        polls += 1
        time.sleep(0.05)
        if polls == 100:
            before_resume.append(len(commits))
            resume(commits[0])

    monkeypatch.setattr(Store, "commit", commit)
    monkeypatch.setattr("flows.pause.sleep", poll)
    state, summary = run(many_chunks(tmp_path, LENGTHS))
    assert state.is_completed()
    assert summary.extracted == len(LENGTHS)
    assert len(commits) >= 10
    # Begun by then: the first chunk, two that wait behind it, and the one that took its place.
    assert 1 <= before_resume[0] <= 5
    with pytest.raises(PauseError, match="cannot be paused: it is Completed"):
        pause(commits[0])
    with pytest.raises(PauseError, match="cannot be resumed"):
        resume(commits[0])
    with pytest.raises(PauseError, match="knows no run no-such-run"):
        pause("no-such-run")


def test_only_what_failed_is_extracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.extract.task.STAGE", f"{faults.__name__}:stage")
    monkeypatch.setenv(faults.LENGTHS, "33")
    monkeypatch.setenv(faults.FULL, "17")
    rows = [{"id": f"row-{n}", "input_ids": list(range(1, n + 1))} for n in (40, 33, 17, 25)]
    wanted = extraction(tmp_path, rows)
    state, summary = run(wanted)
    assert state.is_failed()
    assert (len(summary.quarantined), len(summary.failed_chunks)) == (1, 1)
    stored = len(open_store(wanted.store))

    monkeypatch.setenv(faults.LENGTHS, "")
    monkeypatch.setenv(faults.FULL, "")
    write(tmp_path / "chats.jsonl", [*rows, {"id": "new", "input_ids": [7, 7, 7]}])
    state, summary = run(wanted, only_failed=True)
    assert state.is_completed()
    assert (summary.extracted, summary.reused) == (len(rows) - stored, 0)
    assert {listed.num_tokens for listed in open_store(wanted.store).listing()} == {40, 33, 17, 25}
    state, summary = run(wanted, only_failed=True)
    assert (summary.extracted, summary.reused) == (0, 0), "nothing failed in the last run"


def test_a_seed_and_a_limit_choose_rows(tmp_path: Path) -> None:
    rows = [{"id": f"row-{n}", "input_ids": [n, 2, 3]} for n in range(1, 40)]
    wanted = extraction(tmp_path, rows)
    _, summary = run(wanted, limit=3, shuffle_seed=5)
    assert summary.extracted == 3
    chosen = sorted(open_store(wanted.store).source_ids)
    assert chosen != ["row-1", "row-2", "row-3"]
    _, summary = run(wanted, limit=3, shuffle_seed=5)
    assert (summary.extracted, summary.reused) == (0, 3)
