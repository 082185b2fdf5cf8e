"""Nodes of a fleet as processes: a Prefect worker each, which takes one run at a time, on a core of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate

from flows.extract import extract

ROOT = Path(__file__).parent.parent.parent


def deploy(pool: str, entrypoint: str) -> str:
    """Make a work pool, and in it a deployment of the flow at the entry point; returns the deployment's name."""
    with get_client(sync_client=True) as client:
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
        client.create_deployment(
            flow_id=client.create_flow(extract),
            name=pool,
            work_pool_name=pool,
            path=str(ROOT),
            entrypoint=entrypoint,
            pull_steps=[{"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}],
        )
    return f"extract/{pool}"


@contextmanager
def workers(address: str, pool: str, cores: Mapping[str, int], directory: Path, **variables: str) -> Iterator[None]:
    """Workers of a pool, one for each node: its name, and the core that all its processes run on."""
    started: list[subprocess.Popen[bytes]] = []
    for name, core in cores.items():
        environment = os.environ | {
            "PREFECT_API_URL": f"{address}/api",
            "PREFECT_HOME": str(directory / name),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "LAYERTAP_NODE": f"{pool}-{name}",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = ["taskset", "--cpu-list", str(core), sys.executable, "-m", "prefect", "worker", "start"]
        command += ["--pool", pool, "--name", name, "--limit", "1"]
        with (directory / f"{name}.log").open("wb") as log:
            started.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
            )
    try:
        yield
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
