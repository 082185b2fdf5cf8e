"""When the engine is started, started again, and not started any more; with an engine that only counts."""

from typing import Any

import pytest

from tasks.extract import task
from tasks.extract.checks import StartupError
from tasks.extract.engine import EngineClosed, EngineDied
from tasks.extract.task import FAILED_STARTS, Halted, LazyEngine


class Counted:
    """An engine whose starts go as the script says: None for well, or an error."""

    facts: dict[str, Any] = {}  # noqa: RUF012
    continuation = ()
    made: list["Counted"]
    script: list[Exception | None]

    def __init__(self, spec: Any) -> None:
        self.alive = False
        self.shut = 0
        self.others_alive = any(engine.alive or not engine.shut for engine in self.made)
        self.made.append(self)

    def start(self) -> None:
        error = self.script.pop(0) if self.script else None
        if error is not None:
            raise error
        self.alive = True

    def shutdown(self) -> None:
        self.alive = False
        self.shut += 1


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> type[Counted]:
    Counted.made, Counted.script = [], []
    monkeypatch.setattr(task, "CaptureEngine", Counted)
    return Counted


def lazy() -> LazyEngine:
    return LazyEngine(None)  # type: ignore[arg-type]


def test_it_is_started_once_for_all_chunks_and_shut_down_at_the_end(engines: type[Counted]) -> None:
    with lazy() as engine:
        assert engine.started is None
        assert engine.get() is engine.get()
    assert [made.shut for made in engines.made] == [1]


def test_without_a_chunk_it_is_not_started(engines: type[Counted]) -> None:
    with lazy():
        pass
    assert engines.made == []


def test_one_that_died_is_shut_down_before_the_next_is_made(engines: type[Counted]) -> None:
    with lazy() as engine:
        first: Any = engine.get()
        first.alive = False
        second: Any = engine.get()
        assert second is not first
        assert first.shut == 1
        assert not second.others_alive, "the devices must be free before the next one loads"


def test_a_start_that_fails_may_pass(engines: type[Counted]) -> None:
    engines.script = [RuntimeError("a rank was killed"), None]
    with lazy() as engine:
        with pytest.raises(EngineDied, match="a rank was killed"):
            engine.get()
        assert engine.get().alive


def test_after_some_failed_starts_it_is_given_up(engines: type[Counted]) -> None:
    engines.script = [RuntimeError("out of memory")] * 100
    with lazy() as engine:
        for _ in range(FAILED_STARTS):
            with pytest.raises(EngineDied):
                engine.get()
        for _ in range(5):
            with pytest.raises(Halted, match="the engine does not start: out of memory"):
                engine.get()
    assert len(engines.made) == FAILED_STARTS


def test_what_cannot_work_is_tried_once(engines: type[Counted]) -> None:
    engines.script = [StartupError("use another size")] * 100
    with lazy() as engine:
        with pytest.raises(StartupError, match="use another size"):
            engine.get()
        with pytest.raises(Halted, match="use another size"):
            engine.get()
    assert len(engines.made) == 1


def test_when_the_run_ends_no_chunk_starts_another(engines: type[Counted]) -> None:
    with lazy() as engine:
        engine.get()
    with pytest.raises(EngineClosed):
        engine.get()
    assert len(engines.made) == 1
