"""What `bash infra/deploy` leaves behind when it is ended while a run is under way."""

import os
import signal
import socket
import sqlite3
import subprocess
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import get_client
from prefect.states import Cancelling, Completed, Running

from infra import dead_runs
from tests.flows.nodes import deploy
from tests.flows.site import Site
from tests.flows.test_deployments import extraction


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@pytest.mark.engine
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


def test_a_run_whose_process_is_gone_is_marked_as_crashed(prefect_server: str) -> None:
    """Only of the worker of this name: what others have under way is theirs, and no process here."""
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    deployment = deploy("of-a-machine", "flows/extract.py:extract")
    with get_client(sync_client=True) as client, ExitStack() as stack:
        found = client.read_deployment_by_name(deployment)

        def begin(worker: str, state: Any, pid: int | None = None) -> UUID:
            labels = {"prefect.worker.name": worker}
            run = client.create_flow_run_from_deployment(found.id, labels=labels)
            if pid is None:
                environment = os.environ | {"PREFECT__FLOW_RUN_ID": str(run.id)}
                process = stack.enter_context(subprocess.Popen(["sleep", "600"], env=environment))
                stack.callback(process.kill)
                pid = process.pid
            client.update_flow_run(run.id, infrastructure_pid=str(pid))
            client.set_flow_run_state(run.id, Running(), force=True)  # or cancelling it would end it at once
            client.set_flow_run_state(run.id, state, force=True)
            return run.id

        runs = {
            begin("here", Running(), ended.pid): "Crashed",
            begin("here", Cancelling(), ended.pid): "Crashed",
            begin("here", Running(), os.getpid()): "Crashed",  # the number has come to be another's
            begin("here", Running()): "Running",
            begin("here", Completed(), ended.pid): "Completed",
            begin("there", Running(), ended.pid): "Running",
        }
        assert len(dead_runs.mark("here", pool="of-a-machine")) == 3
        assert {run: str(client.read_flow_run(run).state_name) for run in runs} == runs
