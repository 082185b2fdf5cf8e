"""What a person can do to a run: pause and resume it, run only what failed, and start a second one beside it."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from flows.extract import extract
from flows.pause import PauseError, PauseGate, pause, resume
from tasks.extract.devices import Devices, engine_devices
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
    original_commit, original_gate = Store.commit, PauseGate.__call__
    commits, polls = count(1), count(1)
    runs: list[str] = []
    begun: list[int] = []  # chunks that were let through to the engine
    seen: dict[str, tuple[int, int]] = {}

    def commit(store: Store, samples: list[StagedSample]) -> list[str]:
        if next(commits) == 1:
            runs.append(store.run)
            pause(store.run)
        return original_commit(store, samples)

    def gate(self: PauseGate, ended: Callable[[], bool]) -> None:
        original_gate(self, ended)
        begun.append(1)

    def poll(seconds: float) -> None:
        number = next(polls)
        if number == 50:
            seen["soon"] = len(begun), 0
        elif number >= 300 and number % 50 == 0 and (stored := len(open_store(wanted.store))):
            seen.setdefault("late", (len(begun), stored))
            with suppress(PauseError):  # another thread was faster
                resume(runs[0])
        time.sleep(0.02)

    monkeypatch.setattr(Store, "commit", commit)
    monkeypatch.setattr(PauseGate, "__call__", gate)
    monkeypatch.setattr("flows.pause.sleep", poll)
    wanted = many_chunks(tmp_path, LENGTHS)
    state, summary = run(wanted)
    assert state.is_completed()
    assert summary.extracted == len(LENGTHS)
    (soon, _), (late, stored) = seen["soon"], seen["late"]
    assert soon == late < len(begun), "no chunk was begun while the run was paused"
    assert 0 < stored < len(LENGTHS), "what had been begun was committed meanwhile"
    with pytest.raises(PauseError, match="cannot be paused: it is Completed"):
        pause(runs[0])
    with pytest.raises(PauseError, match="cannot be resumed"):
        resume(runs[0])
    with pytest.raises(PauseError, match="knows no run no-such-run"):
        pause("no-such-run")


def test_only_what_failed_is_extracted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.extract.task.STAGE", f"{faults.__name__}:stage")
    monkeypatch.setenv(faults.LENGTHS, "33")
    monkeypatch.setenv(faults.FULL, "17")
    rows = [{"id": f"row-{n}", "input_ids": list(range(1, n + 1))} for n in (33, 40, 17, 25)]
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


def test_an_engine_waits_for_the_one_that_has_its_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Devices("brave-otter")
    assert first.take(engine_devices(1, None, on_cpu=True), threading.Event())
    told: list[str] = []

    def warning(message: str) -> None:
        told.append(message)
        first.release()

    monkeypatch.setattr("tasks.extract.devices.logger.warning", warning)
    state, _ = run(extraction(tmp_path, [{"id": "row", "input_ids": [1, 2, 3]}]))
    assert state.is_completed()
    assert "is in use by the engine of brave-otter" in told[0]
    again = Devices("after")
    stop = threading.Event()
    stop.set()
    assert again.take(engine_devices(1, None, on_cpu=True), stop), "the run has let go of them"
    again.release()
