"""Order of the tests, and the Prefect server that those of flows share."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

import pytest
from hypothesis import settings
from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

T = TypeVar("T")

# Engines of tests wait for no engine of this machine's other work.
os.environ.setdefault("LAYERTAP_NODE", f"tests-{os.getpid()}")

# Machines are shared: how long an example takes says nothing of the code.
settings.register_profile("shared", deadline=None)
settings.load_profile("shared")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that fork first, then other quick ones, then those that run flows, then those that start an engine."""

    def place(item: pytest.Item) -> int:
        if "fork" in item.name:
            # Once a flow ran in this process, what is forked from it ends with an error: Prefect's services in it
            # want to be drained, and never ran.
            return 0
        if "engine" not in item.keywords:
            return 2 if "prefect_server" in getattr(item, "fixturenames", ()) else 1
        # vLLM's multimodal code imports numba, after which no engine starts in this process any more.
        return 4 if "kimi" in item.name else 3

    items.sort(key=place)


@pytest.fixture(scope="session")
def prefect_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of a real Prefect server with its UI, to which flows report; one for the session.

    Prefect's clients in this process stay with the first server they have met: with a second one, states get lost and
    the process waits for ever at its end.
    """
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    environment = os.environ | {
        "PREFECT_HOME": str(tmp_path_factory.mktemp("prefect")),
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    }
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until_up(f"{address}/api/health")
            with temporary_settings({PREFECT_API_URL: f"{address}/api"}):
                yield address
                # What is not sent by now would wait for this server at the process's end.
                APILogWorker.drain_all(timeout=30)
                EventsWorker.drain_all(timeout=30)
        finally:
            process.send_signal(signal.SIGINT)


def wait_until_up(url: str, seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(url):
                return
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, f"{url} did not come up"
            time.sleep(0.5)


def eventually(look: Callable[[], T | None], seconds: float = 60) -> T:
    """What ``look`` finds as soon as it finds something."""
    deadline = time.monotonic() + seconds
    while (found := look()) is None:
        assert time.monotonic() < deadline, "nothing came"
        time.sleep(0.005)
    return found
