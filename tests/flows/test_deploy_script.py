"""What `bash infra/deploy` leaves behind when it is ended while a run is under way."""

import os
import signal
import socket
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.flows.site import Site
from tests.flows.test_deployments import extraction

pytestmark = pytest.mark.engine


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_an_interrupt_at_the_terminal_ends_the_run_before_the_server(tmp_path: Path) -> None:
    """All of the script's process group gets it, as from Ctrl-C."""
    port = free_port()
    place = Site(f"http://127.0.0.1:{port}", tmp_path)
    address = place.environment.pop("PREFECT_API_URL")
    place.environment["LAYERTAP_PORT"] = str(port)
    try:
        script = place.deploy()
        place.wait(place.worker_started)
        place.environment["PREFECT_API_URL"] = address
        place.add_scripted()
        place.script("33.hold.1")
        run = place.start(extraction(tmp_path / "held"))
        place.wait((tmp_path / "holding").exists)
        os.killpg(script.pid, signal.SIGINT)
        assert script.wait(timeout=120) == 130
        place.wait(lambda: not place.leftovers())
        with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
            states = dict(database.execute("select id, state_name from flow_run").fetchall())
        assert states == {run: "Crashed"}
        told = (tmp_path / "deploy-0.log").read_text()
        assert "Traceback" not in told
    finally:
        place.close()
