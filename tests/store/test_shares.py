"""Several runs fill one store together, each with keys of its own."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasks.store
from tasks.store import Share, SourceRecord, Store, StoreBusy, object_store
from tasks.store.local import StagingArea
from tasks.store.maintenance import gc, verify
from tasks.store.manifest import MANIFEST
from tests.store.samples import Made, fill, identity, make, stage
from tests.store.test_crashes import STEPS, Killed, kill_at

SAMPLES = [make(identity(), n, seed=i) for i, n in enumerate((3, 520, 5, 7, 9, 4))]
PARTS = (SAMPLES[0::2], SAMPLES[1::2])


def planned(samples: list[Made]) -> list[tuple[str, int]]:
    return [(s.key, len(s.input_ids)) for s in samples]


def share(number: int, group: str = "fleet") -> Share:
    return Share(group, f"share-{number}")


def opened(url: str, number: int, group: str = "fleet", run: str = "run", wait_s: float = 0) -> Store:
    return Store.open(url, identity(), run=run, share=share(number, group), wait_s=wait_s)


def check_whole(url: str) -> None:
    found = verify(url)
    assert (found.ok, found.samples, found.unrecorded, found.leftovers) == (True, len(SAMPLES), [], [])
    reader = tasks.store.open(url)
    for sample in SAMPLES:
        np.testing.assert_array_equal(reader.read(sample.key).states_LTH, sample.states)


def test_two_shares_fill_a_store_in_turns(url: str) -> None:
    with opened(url, 0) as first, opened(url, 1) as second:
        for mine, others in zip(*PARTS, strict=True):
            fill(first, [mine], prefix=mine.key)
            fill(second, [others], prefix=others.key)
        assert first.missing(planned(PARTS[0])) == second.missing(planned(PARTS[1])) == []
        assert len(set(first.backend.names(MANIFEST))) == 1 + len(SAMPLES), "no segment replaces another's"
    check_whole(url)
    assert set(tasks.store.open(url).source_ids) == {f"{s.key}-0" for s in SAMPLES}


def test_whoever_is_not_of_the_group_waits(url: str) -> None:
    with opened(url, 0, run="node-a"):
        for refused in (
            lambda: Store.open(url, identity(), run="alone"),
            lambda: opened(url, 1, group="another"),
            lambda: gc(url),
        ):
            with pytest.raises(StoreBusy, match=r"being written by run node-a of fleet"):
                refused()
        with pytest.raises(StoreBusy, match="being written by run node-a"):
            opened(url, 0, run="node-b")
        with opened(url, 1):
            pass
    with Store.open(url, identity(), run="alone"), pytest.raises(StoreBusy, match="being written by run alone"):
        opened(url, 0)
    with opened(url, 1, group="another"):
        pass


def test_only_a_run_that_is_alone_merges_the_manifest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.store.manifest._SEGMENTS_BEFORE_MERGE", 3)
    with opened(url, 0) as first:
        for sample in PARTS[0]:
            fill(first, [sample], prefix=sample.key)
        with opened(url, 1) as second:
            assert len(second.backend.names(MANIFEST)) == 1 + 3
            fill(second, PARTS[1], prefix="second")
    with Store.open(url, identity()) as alone:
        assert len(alone.backend.names(MANIFEST)) == 1
    check_whole(url)


def test_a_share_that_was_taken_over_commits_nothing_more(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory()
    lost, other = opened(url, 0, run="lost"), opened(url, 1)
    staged = stage(lost, PARTS[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "_STALE_S", -1.0)
        successor = opened(url, 0, run="successor")
    with pytest.raises(StoreBusy, match="another run has taken over"):
        lost.commit([staged])
    with pytest.raises(StoreBusy, match="another run has taken over"):
        lost.record()
    fill(successor, PARTS[0], prefix="first")
    fill(other, PARTS[1], prefix="second")
    for store in (lost, successor, other):
        store.close()
    check_whole(url)


def test_a_share_of_a_store_that_was_taken_over_stops(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory()
    slow = opened(url, 0)
    staged = stage(slow, PARTS[0][0])
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "_STALE_S", -1.0)
        Store.open(url, identity(), run="alone").close()
    with opened(url, 1), pytest.raises(StoreBusy, match="another run has taken over"):
        slow.commit([staged])


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_kill_before_any_step_of_one_share(
    place: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_second(url: str) -> list[str]:
        made = {s.key: s for s in PARTS[1]}
        with opened(url, 1) as store:
            missing = store.missing(planned(PARTS[1]))
            for key in missing:
                store.commit([stage(store, made[key], (f"of {key}",))])
                store.record([SourceRecord(f"of {key}", key, made[key].loss_mask)])
            store.record(SourceRecord(f"of {s.key}", s.key, s.loss_mask) for s in PARTS[1])
        return missing

    def fresh(number: int) -> str:
        made: str = request.getfixturevalue("memory")() if place == "memory" else str(tmp_path / str(number))
        return made

    number, steps = -1, 10**9
    while number < steps:
        url = fresh(number)
        with opened(url, 0) as first:
            fill(first, PARTS[0][:1], prefix="a")
            with monkeypatch.context() as patch:
                if number < 0:
                    count = kill_at(steps, STEPS[place], patch)
                    run_second(url)
                    steps = count()
                else:
                    kill_at(number, STEPS[place], patch)
                    with pytest.raises(Killed):
                        run_second(url)
            fill(first, PARTS[0][1:2], prefix="b")
            with monkeypatch.context() as patch:
                patch.setattr(object_store, "_is_alive", lambda pid: False)  # the holder of the share is gone
                again = run_second(url)
            fill(first, PARTS[0][2:], prefix="c")
        assert len(again) == len(set(again))
        check_whole(url)
        assert {f"of {s.key}" for s in PARTS[1]} <= set(tasks.store.open(url).source_ids)
        number += 2 if number > 0 else 1
    assert steps > 15


def test_a_new_staging_directory_survives_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    area, collector = StagingArea(tmp_path), StagingArea(tmp_path)
    original, calls = Path.mkdir, []

    def mkdir(path: Path, *args: Any, **kwargs: Any) -> None:
        original(path, *args, **kwargs)
        if path.parent == tmp_path and not calls:
            calls.append(collector.collect())  # between the directory and its lock

    monkeypatch.setattr(Path, "mkdir", mkdir)
    directory = area.create("run")
    assert calls == [1]
    assert (directory / "owner.json").exists()
    assert collector.collect() == 0
    area.drop(directory)


def test_shares_commit_at_the_same_time(tmp_path: Path) -> None:
    url = str(tmp_path / "store")
    Store.open(url, identity()).close()

    def run(number: int) -> None:
        with opened(url, number, run=f"node-{number}", wait_s=30) as store:
            for sample in PARTS[number]:
                fill(store, [sample], prefix=sample.key)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check_whole(url)


def test_what_failed_is_noted_until_the_next_run_notes_its_own(url: str) -> None:
    keys = sorted(s.key for s in SAMPLES)
    with opened(url, 0) as first, opened(url, 1) as second:
        first.write_failed(keys[:1])
        second.write_failed(keys[1:2])
        assert first.failed() == set(keys[:2])
    with Store.open(url, identity()) as alone:
        assert alone.failed() == set(keys[:2])
        alone.write_failed([])
        assert alone.failed() == set()
        alone.quarantine(keys[2], ["a source"], "shape", "")
        assert alone.failed() == {keys[2]}
