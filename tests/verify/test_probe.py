"""The sentence that the model goes on with: what cannot come from a trained model is told from what can."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.extract.task import Halted, LazyEngine
from tasks.model import read
from tasks.verify.probe import PROMPT, Probe, degenerate
from tests.checkpoints import byte_tokenizer, checkpoint_path


@pytest.mark.parametrize(
    ("tokens", "text", "problem"),
    [
        ([5, 6, 7, 8], " Rome.\n", None),
        ([5, 5, 5], "!!1", None),
        ([5, 5, 5, 5], " the the the the", "repeats one token, 5"),
        ([5, 6, 7, 8], "!?.,", "neither a letter nor a digit"),
        ([5, 6, 7, 8], "罗马", None),
        ([5, 6, 7, 8], "a���", "no text"),
        ([], "", "nothing"),
    ],
)
def test_what_no_trained_model_writes(tokens: list[int], text: str, problem: str | None) -> None:
    found = degenerate(tokens, text)
    assert found is None if problem is None else found is not None and problem in found


def test_the_prompt_is_in_the_checkpoint_s_own_tokens() -> None:
    probe = Probe(read(checkpoint_path("llama")))
    assert byte_tokenizer().decode(probe.ids) == PROMPT
    continuation = probe.judge(byte_tokenizer().encode(" Rome."))
    assert (continuation.text, continuation.problem) == (" Rome.", None)
    assert str(continuation) == f"{PROMPT} [...]  Rome."


def test_without_a_tokenizer_there_is_no_probe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert Probe(replace(read(checkpoint_path("llama")), path=tmp_path)).ids == ()
    assert "not asked to go on" in caplog.text


def test_a_tokenizer_of_another_model_gives_no_probe(caplog: pytest.LogCaptureFixture) -> None:
    assert Probe(replace(read(checkpoint_path("llama")), vocab_size=64)).ids == ()
    assert "tokens that it lacks" in caplog.text


class Started:
    """An engine that has started."""

    alive = True

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        self.continuation = CONTINUATIONS.pop()
        self.facts = {"device": "scripted"}

    def start(self) -> "Started":
        return self

    def shutdown(self) -> None:
        self.alive = False


CONTINUATIONS: list[tuple[int, ...]] = []


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> tuple[LazyEngine, list[Any]]:
    """An engine that is not there yet, and what it will have recorded."""
    monkeypatch.setattr("tasks.extract.task.CaptureEngine", Started)
    monkeypatch.setattr("tasks.extract.task.replace", lambda spec, **changes: changes)
    recorded: list[Any] = []
    probe = Probe(read(checkpoint_path("llama")))
    return LazyEngine(None, probe=probe, record=recorded.append), recorded  # type: ignore[arg-type]


def test_a_readable_continuation_is_kept_with_the_run(engine: tuple[LazyEngine, list[Any]]) -> None:
    lazy, recorded = engine
    CONTINUATIONS.append(tuple(byte_tokenizer().encode(" Rome.")))
    with lazy:
        assert lazy.get().spec["probe"] == lazy._probe.ids  # type: ignore[index, union-attr]
    assert lazy.halted is None
    assert json.loads(json.dumps(recorded)) == [
        {"started": {"engine": {"device": "scripted"}, "probe": f"{PROMPT} [...]  Rome."}}
    ]


def test_garbage_stops_the_run_with_what_to_look_at(engine: tuple[LazyEngine, list[Any]]) -> None:
    lazy, recorded = engine
    CONTINUATIONS.append((33,) * 16)
    with lazy, pytest.raises(Halted, match=r"repeats one token, 33 .*kernels.*audit\.probe: false if .* not trained"):
        lazy.get()
    assert len(recorded) == 1
    with pytest.raises(Halted):
        lazy.get()
