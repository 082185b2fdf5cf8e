"""The Prefect server that a command keeps for itself where there is no other.

Prefect starts such a server as a plain child. An interrupt at the terminal reaches that as soon as the run, which then
has nobody to tell its end and goes on asking for minutes; and when the run is killed, the server stays for ever. This
one is out of the terminal's reach, and ends when the process that it serves is gone.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from prefect.server.api.server import SubprocessASGIServer
from prefect.settings import get_current_settings

from tasks.processes import Process
from tasks.report.log import logger

GRACE_SECONDS = 10.0  # for the server to write down what it was told, once its owner is gone


class OwnServer(SubprocessASGIServer):
    """As Prefect's; the first one that is made is the one that all of Prefect in this process asks for."""

    def _run_uvicorn_command(self) -> "subprocess.Popen[Any]":
        logger.info("starting a Prefect server for this command; that takes some seconds")
        settings = get_current_settings().to_environment_variables(exclude_unset=True)
        kept = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        path = {"PYTHONPATH": os.pathsep.join(p or str(Path.cwd()) for p in sys.path)}
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(self.port), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **kept, **settings, **path},
            start_new_session=True,
        )


def serve(port: int, owner: int) -> None:
    """The server's process."""
    import uvicorn

    try:
        served = Process(owner)
    except ProcessLookupError:
        return
    if os.getppid() != owner:  # it is gone, and its number may have come to be another's
        return
    served.when_gone(_end)
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=port,
        log_level="error",
        lifespan="on",
    )


def _end() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    serve(int(sys.argv[1]), int(sys.argv[2]))
