"""A run whose worker is killed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import httpx
import pytest

from flows import run

ROOT = Path(__file__).parent.parent.parent

RUN = """
import time
from flows.run import _end_with_worker

_end_with_worker()
print("up", flush=True)
time.sleep(1000)
"""
WORKER = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {RUN!r}])"


@pytest.mark.engine
def test_a_run_ends_with_its_worker_and_says_so(prefect_server: str, tmp_path: Path) -> None:
    with httpx.Client(base_url=f"{prefect_server}/api", timeout=60) as api:
        flow = api.post("/flows/", json={"name": "of-a-test"}).json()["id"]
        running = {"type": "RUNNING", "name": "Running"}
        killed = api.post("/flow_runs/", json={"flow_id": flow, "state": running}).json()["id"]
        environment = os.environ | {
            "PREFECT_API_URL": f"{prefect_server}/api",
            "PREFECT_HOME": str(tmp_path),
            "PREFECT__FLOW_RUN_ID": killed,
        }
        command = [sys.executable, "-c", WORKER]
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as worker:
            assert worker.stdout is not None
            assert worker.stdout.readline() == b"up\n"
            worker.kill()
            assert worker.stdout.read() == b"", "the run's process has ended, and with it all that held the pipe"
        state = api.get(f"/flow_runs/{killed}").json()["state"]
        assert (state["name"], state["message"]) == ("Crashed", "the worker that started this run is gone")


def test_a_run_that_a_person_started_has_no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PREFECT__FLOW_RUN_ID", raising=False)
    threads = threading.active_count()
    run._end_with_worker.__wrapped__()
    assert threading.active_count() == threads
