"""Nodes of a fleet as processes: a Prefect worker each, which takes one run at a time, on a core of its own."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
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


def pinned(core: int) -> list[str]:
    """What a command begins with to run on one core."""
    return ["taskset", "--cpu-list", str(core)]


@contextmanager
def workers(
    address: str, pool: str, nodes: Mapping[str, Sequence[str]], directory: Path, **variables: str
) -> Iterator[None]:
    """Workers of a pool, one for each node.

    Args:
        address: of the Prefect server.
        pool: that they work for.
        nodes: name -> what the worker's command begins with, such as :func:`pinned`.
        directory: takes the workers' logs.
        variables: more of their environment.
    """
    started: list[subprocess.Popen[bytes]] = []
    for name, prefix in nodes.items():
        environment = os.environ | {
            "PREFECT_API_URL": f"{address}/api",
            "PREFECT_HOME": str(directory / name),
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "LAYERTAP_NODE": f"{pool}-{name}",
            "OMP_NUM_THREADS": "1",
            **variables,
        }
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [*prefix, sys.executable, "-m", "prefect", "worker", "start", "--pool", pool]
        command += ["--name", name, "--limit", "1"]
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
