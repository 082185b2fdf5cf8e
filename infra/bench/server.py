"""A Prefect server of its own for a benchmark."""

import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager


@contextmanager
def prefect_server(host: str = "127.0.0.1") -> Iterator[str]:
    """Address of a real server in a process of its own, with an empty SQLite database."""
    with closing(socket.socket()) as free:
        free.bind((host, 0))
        port = free.getsockname()[1]
    address = f"http://{host}:{port}"
    with tempfile.TemporaryDirectory() as home:
        environment = os.environ | {
            "PREFECT_HOME": home,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        command = [sys.executable, "-m", "prefect", "server", "start", "--host", host, "--port", str(port)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
            try:
                _wait_until_up(f"{address}/api/health", server)
                yield address
            finally:
                server.terminate()  # an interrupt is ignored where the benchmark runs in a shell's background


def _wait_until_up(url: str, server: "subprocess.Popen[bytes]") -> None:
    while server.poll() is None:
        try:
            with urllib.request.urlopen(url):
                return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise RuntimeError("the Prefect server did not start")
