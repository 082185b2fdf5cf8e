"""A real PostgreSQL for tests, from the operating system's packages (see infra/services)."""

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.flows.killers import wait_until

USER, DATABASE = "prefect", "postgres"


def programs() -> Path:
    """Where initdb and postgres are; Debian keeps them off the PATH."""
    installed = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    if installed:
        return installed[-1]
    found = shutil.which("initdb")
    assert found is not None, "no PostgreSQL; infra/services installs it"
    return Path(found).parent


@contextmanager
def postgresql(port: int) -> Iterator[str]:
    """Run a server over a database of its own; yields the URL without the scheme."""
    bin = programs()
    # PostgreSQL refuses to run as root, and Debian's package has made a user for it.
    other: dict[str, Any] = {"user": "postgres", "group": "postgres", "extra_groups": []} if not os.geteuid() else {}
    with tempfile.TemporaryDirectory(prefix="layertap-postgresql-") as name:
        if other:
            shutil.chown(name, "postgres", "postgres")
        data = f"{name}/data"
        initialize = [bin / "initdb", "-D", data, "--auth=trust", f"--username={USER}", "--encoding=UTF8", "--no-sync"]
        subprocess.run(initialize, cwd=name, check=True, capture_output=True, **other)
        options = {"listen_addresses": "127.0.0.1", "port": port, "unix_socket_directories": name, "fsync": "off"}
        command = [bin / "postgres", "-D", data, *(part for o, v in options.items() for part in ("-c", f"{o}={v}"))]
        with (Path(name) / "log").open("wb") as log:
            server = subprocess.Popen(command, cwd=name, stdout=log, stderr=log, **other)
        try:
            ready = [bin / "pg_isready", "--quiet", "--host=127.0.0.1", f"--port={port}", f"--dbname={DATABASE}"]
            wait_until(lambda: subprocess.run(ready, check=False).returncode == 0)
            yield f"{USER}@127.0.0.1:{port}/{DATABASE}"
        finally:
            server.send_signal(signal.SIGINT)  # PostgreSQL's fast shutdown
            server.wait(timeout=60)


def count(address: str, table: str) -> int:
    """Rows of a table."""
    command = ["psql", f"postgresql://{address}", "--tuples-only", "--no-align", "--command"]
    told = subprocess.run([*command, f"select count(*) from {table}"], capture_output=True, text=True, check=True)
    return int(told.stdout)
