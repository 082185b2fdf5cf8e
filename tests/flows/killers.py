"""A stage that fails or kills where a test says so: at a sample of a given length, once so many are in the store.

The script is a directory of empty files named ``number.length.action.committed``; each is used up when it acts. It
lies in the directory that an environment variable names, which also marks every process of the test's flows.
"""

import errno
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.store.errors import storage_failures
from tasks.store.stage import stage_states

SITE = "LAYERTAP_TEST_SITE"
SECONDS = 300  # no script needs longer; a test that has gone wrong should end


def stage(directory: Any, key: str, spec: Any, states_LTH: Any, input_ids: Any, executor: Any) -> Any:
    for entry in sorted((site() / "script").glob(f"*.{states_LTH.shape[1]}.*")):
        _, _, action, committed = entry.name.split(".")
        samples = Path(directory).parents[2] / "samples"
        wait_until(lambda n=int(committed), there=samples: len(list(there.glob("??/*/zarr.json"))) >= n)
        entry.unlink()
        ACTIONS[action]()
        break
    return stage_states(directory, key, spec, states_LTH, input_ids, executor)


def site() -> Path:
    return Path(os.environ[SITE])


def ending() -> Path:
    """A file that is there once the flow has begun to end (see tests.flows.scripted)."""
    return site() / "ending"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def flow() -> int:
    return int(os.environ["LAYERTAP_OWNER_PID"])


def fail() -> None:
    raise ArithmeticError("scripted")


def refuse(number: int) -> None:
    with storage_failures("scripted"):
        raise OSError(number, os.strerror(number))


def hold() -> None:
    (site() / "holding").touch()
    wait_until(ending().exists)


def kill_flow() -> None:
    os.kill(flow(), signal.SIGKILL)
    hold()  # this process is to be ended by what watches the flow


def kill_worker() -> None:
    os.kill(parent(flow()), signal.SIGKILL)
    hold()


def kill_engine_core() -> None:
    """The process between this rank and the flow, or this one where there is none."""
    above = os.getppid()
    os.kill(above if above != flow() else os.getpid(), signal.SIGKILL)
    hold()


def kill_rank() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


ACTIONS: dict[str, Callable[[], None]] = {
    "fail": fail,
    "disk-full": lambda: refuse(errno.ENOSPC),
    "disk-error": lambda: refuse(errno.EIO),
    "hold": hold,
    "kill-flow": kill_flow,
    "kill-worker": kill_worker,
    "kill-engine-core": kill_engine_core,
    "kill-rank": kill_rank,
}
