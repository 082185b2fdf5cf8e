"""A run that ends at any moment leaves whole samples or none, and the next one finishes the work."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tasks.store
from tasks.store import SourceRecord, StorageFailure, Store, local, object_store
from tasks.store.maintenance import verify
from tests.store.kill_rounds import play
from tests.store.samples import Made, identity, make, stage


class Killed(BaseException):
    """The process ends here."""


def samples() -> list[Made]:
    return [make(identity(), n, seed=i) for i, n in enumerate((3, 520, 5))]


def run(url: str) -> list[str]:
    """A run over all samples in two chunks; returns the keys that it extracted."""
    made = {s.key: s for s in samples()}
    with Store.open(url, identity()) as store:
        missing = store.missing([(key, len(s.input_ids)) for key, s in made.items()])
        for start in range(0, len(missing), 2):
            keys = missing[start : start + 2]
            store.commit([stage(store, made[key], (f"of {key}",)) for key in keys])
            store.record(SourceRecord(f"of {key}", key, made[key].loss_mask) for key in keys)
        store.record(SourceRecord(f"of {key}", key, s.loss_mask) for key, s in made.items())
    return missing


def whole(url: str) -> set[str]:
    """Keys of the samples in the store; none may be damaged."""
    found = verify(url, workers=1)
    assert found.damaged == {}
    reader = tasks.store.open(url)
    visible = {*reader.keys, *found.unrecorded}
    for sample in samples():
        if sample.key in visible:
            np.testing.assert_array_equal(reader.read(sample.key).states_LTH, sample.states)
    return visible


def kill_at(number: int, functions: list[tuple[Any, str]], patch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Let the process end before the ``number``-th call of any of the functions; returns a counter of calls."""
    calls = 0

    def counting(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > number:  # a dead process does nothing more, not even while it unwinds
                raise Killed
            return original(*args, **kwargs)

        return call

    for owner, name in functions:
        patch.setattr(owner, name, counting(getattr(owner, name)))
    return lambda: calls


STEPS = {
    "local": [
        (os, "write"),
        (os, "writev"),
        (Path, "write_bytes"),
        (Path, "rename"),
        (Path, "replace"),
        (Path, "unlink"),
        (local.LocalBackend, "_barrier"),
        (local.shutil, "rmtree"),
    ],
    "memory": [(object_store.obstore, "put"), (object_store.obstore, "delete")],
}


@pytest.mark.parametrize("place", ["local", "memory"])
def test_a_kill_before_any_step(
    place: str, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(number: int) -> str:
        made: str = request.getfixturevalue("memory")() if place == "memory" else str(tmp_path / str(number))
        return made

    with monkeypatch.context() as patch:
        count = kill_at(10**9, STEPS[place], patch)
        run(fresh(-1))
    steps = count()
    assert steps > 20
    outcomes = set()
    for number in range(steps):
        url = fresh(number)
        with monkeypatch.context() as patch:
            kill_at(number, STEPS[place], patch)
            with pytest.raises(Killed):
                run(url)
        monkeypatch.setattr(object_store, "_is_alive", lambda pid: False)  # the holder of the lease is gone
        before = whole(url) if "zarr.json" in tasks.store.backend.open_backend(url).names("") else set()
        again = set(run(url))
        outcomes.add(len(before))
        assert again.isdisjoint(before), "extracted again what was committed"
        assert whole(url) == {s.key for s in samples()}
        found = verify(url, workers=1)
        assert (found.ok, found.unrecorded, found.leftovers) == (True, [], [])
        assert set(tasks.store.open(url).source_ids) == {f"of {s.key}" for s in samples()}
        if place == "local":
            assert list((Path(url) / ".layertap/staging").iterdir()) == []
    assert outcomes >= {0, 2, 3}


def test_a_disk_that_fills_up_at_any_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, os.strerror(28))

    for owner, name in ((os, "writev"), (Path, "write_bytes"), (Path, "mkdir"), (local.LocalBackend, "_barrier")):
        original = getattr(owner, name)
        for number in range(0, 60, 3):
            url = str(tmp_path / f"{name}-{number}")
            calls = 0

            def once_full(*args: Any, number: int = number, original: Any = original, **kwargs: Any) -> Any:
                nonlocal calls
                calls += 1
                return (full if calls > number else original)(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(owner, name, once_full)
                try:
                    run(url)
                    done = True
                except StorageFailure as failure:
                    done, message = False, str(failure)
            if done:
                break
            assert "free space and run again" in message
            before = whole(url) if (Path(url) / "zarr.json").exists() else set()
            assert set(run(url)).isdisjoint(before)
            assert whole(url) == {s.key for s in samples()}


@pytest.mark.parametrize("shares", [1, 2], ids=["alone", "two shares"])
def test_kill_9(shares: int, tmp_path: Path) -> None:
    outcome = play(str(tmp_path / "store"), rounds=2, seed=1, shares=shares)
    assert outcome.clean, outcome
