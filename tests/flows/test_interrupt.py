"""What an interrupt does to a command whose work ends, or does not."""

import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

COMMAND = """
import sys, threading
from flows import interrupt

patience, ends = float(sys.argv[1]), sys.argv[2] == "ends"
interrupt.END_SECONDS = patience
interrupt.standing(lambda: "1 of 2 samples are in the store")

def work():
    try:
        print("at work", flush=True)
        threading.Event().wait()
    except KeyboardInterrupt:
        if ends:
            raise
        print("ending", flush=True)
        threading.Event().wait()

interrupt.interruptible(work)
"""


@pytest.mark.parametrize(
    ("ends", "patience", "presses"),
    [
        pytest.param("ends", 1000, 1, id="in order"),
        pytest.param("hangs", 0.1, 1, id="what takes too long is left"),
        pytest.param("hangs", 1000, 2, id="at once when interrupted again"),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_how_far_it_has_come(ends: str, patience: float, presses: int, number: int) -> None:
    with subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", COMMAND, str(patience), ends],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        for told in ("at work\n", "ending\n")[:presses]:
            assert command.stdout.readline() == told
            command.send_signal(number)
        _, said = command.communicate(timeout=60)
    assert command.returncode == 128 + number
    assert said == "interrupted; 1 of 2 samples are in the store; run the same command again to go on\n"


def test_a_command_that_ignores_interrupts_goes_on() -> None:
    code = "import os, signal; from flows.interrupt import interruptible; "
    code += "interruptible(lambda: os.kill(os.getpid(), signal.SIGINT)); print('done')"
    command = ["env", "--ignore-signal=INT", sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=True)
    assert ended.stdout == "done\n"


FLOW = """
import threading
from prefect import flow
from flows import interrupt
from flows.own_server import OwnServer

@flow
def held():
    interrupt.standing(lambda: "1 of 2 samples are in the store")
    print("at work", flush=True)
    threading.Event().wait()

OwnServer()
interrupt.interruptible(held)
"""


def test_a_flow_that_is_told_to_end_says_so_after_prefect_has_ended_it(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path), "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL"}
    with subprocess.Popen(
        [sys.executable, "-c", FLOW],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as command:
        assert command.stdout is not None
        assert command.stdout.readline() == "at work\n"
        command.send_signal(signal.SIGTERM)
        _, said = command.communicate(timeout=60)
    assert command.returncode == 128 + signal.SIGTERM
    assert said == "interrupted; 1 of 2 samples are in the store; run the same command again to go on\n"
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database:
        assert database.execute("select state_name from flow_run").fetchall() == [("Crashed",)]
