"""How `layertap extract` with a server of its own ends when it is interrupted or killed: soon, and all of it."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.cli import DEFAULTS
from tasks.processes import Process
from tasks.store import open as open_store
from tasks.store.maintenance import verify
from tests.checkpoints import checkpoint_path
from tests.conftest import eventually
from tests.flows import killers
from tests.flows.site import ROOT, marked
from tests.flows.site import SECONDS as LOADED

pytestmark = pytest.mark.engine

LENGTHS = (40, 33, 1, 17, 25, 9)  # in chunks of at most 64 tokens: 40; 33, 1, 17; 25, 9
SECONDS = 120  # a loaded machine's fifteen
START = "import tests.flows.scripted; from flows.cli import run; run()"


def start(directory: Path, *script: str) -> "subprocess.Popen[str]":
    """The command as typed at a terminal, in a process group of its own; its stage follows the script."""
    (directory / "script").mkdir(exist_ok=True)
    for number, entry in enumerate(script):
        (directory / "script" / f"{number}.{entry}").touch()
    rows = [{"id": f"row-{n}", "input_ids": list(range(1, n + 1))} for n in LENGTHS]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted: dict[str, Any] = {
        "model": {"path": str(checkpoint_path("llama"))},
        "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
        "dtype": "float32",
        "data": {"path": "chats.jsonl", "processes": 1},
        "chunk_tokens": 64,
        "store": "store",
        "engine": {
            "max_model_len": 64,
            "max_num_batched_tokens": 64,
            "max_num_seqs": 8,
            "kv_cache_gib": 0.1,
            "in_process": False,
            "staging_gib": 0.1,
            "writer_threads": 4,  # a sample that is held by a script must not hold up the other chunks
        },
    }
    (directory / "mine.yaml").write_text(yaml.safe_dump(wanted))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")} | DEFAULTS
    environment |= {"PREFECT_HOME": str(directory / "prefect"), "PYTHONPATH": str(ROOT), killers.SITE: str(directory)}
    with (directory / "output").open("w") as output:
        return subprocess.Popen(
            ["env", "--default-signal=INT", sys.executable, "-c", START, "extract", "mine.yaml"],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=output,
            text=True,
            start_new_session=True,
        )


def until(condition: Callable[[], Any], run: "subprocess.Popen[str]", seconds: float = LOADED) -> None:
    """Wait for something that the run does."""

    def look() -> Any:
        assert run.poll() is None, "it ended"
        return condition() or None

    eventually(look, seconds)


def whole(directory: Path) -> int:
    """Samples in the store, each of which is whole."""
    found = verify(directory / "store")
    assert found.ok, found
    return len(open_store(directory / "store"))


def leave_nothing(directory: Path) -> None:
    """After a test that has failed."""
    for pid in marked(directory):
        with suppress(ProcessLookupError):
            Process(pid).kill()


def test_an_interrupt_ends_the_run_with_one_sentence(tmp_path: Path) -> None:
    with start(tmp_path, "33.hold.1") as run:
        try:
            until((tmp_path / "holding").exists, run)
            os.killpg(run.pid, signal.SIGINT)
            assert run.wait(SECONDS) == 130
            eventually(lambda: not marked(tmp_path) or None, SECONDS)
        finally:
            leave_nothing(tmp_path)
    told = (tmp_path / "output").read_text()
    stored = whole(tmp_path)
    assert 1 <= stored <= len(LENGTHS)
    sentence = f"interrupted; {stored} of 6 samples are in the store; run the same command again to go on"
    assert told.splitlines()[-1] == sentence
    assert told.count("interrupted") == 1
    for noise in ("Traceback", "Error", "WARNING", "Warning", "Still processing"):
        assert noise not in told, told


def test_a_killed_command_leaves_no_process(tmp_path: Path) -> None:
    """Its server among them."""
    with start(tmp_path, "33.kill-flow.1") as run:
        try:
            assert run.wait(LOADED) == -signal.SIGKILL
            eventually(lambda: not marked(tmp_path) or None, SECONDS)
        finally:
            leave_nothing(tmp_path)
    assert 1 <= whole(tmp_path) < len(LENGTHS)
