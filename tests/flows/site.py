"""A place where deployments run, as a user has it: a server, ``bash infra/deploy``, a worker, and the command line."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from flows.config import Extraction
from tests.flows import killers

ROOT = Path(__file__).parent.parent.parent
SECONDS = 900  # for whatever is waited for; machines are shared


def marked(directory: Path) -> dict[int, str]:
    """Running processes that are marked by the directory, and their commands."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            mark = f"{killers.SITE}={directory}".encode()
            dead = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if mark in (entry / "environ").read_bytes().split(b"\0") and not dead:
                found[int(entry.name)] = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return found


def parent(pid: int) -> int | None:
    """The process that started this one; None if it has ended."""
    try:
        return killers.parent(pid)
    except OSError:
        return None


class Site:
    """A server at an address, with processes that are marked by the directory of the site."""

    def __init__(self, address: str, directory: Path) -> None:
        self.address = address
        self.directory = directory
        (directory / "script").mkdir()
        self.environment = os.environ | {
            "PREFECT_API_URL": f"{address}/api",
            "PREFECT_UI_URL": f"{address}/v2",
            "PREFECT_HOME": str(directory / "prefect"),
            "VIRTUAL_ENV": sys.prefix,
            "COLUMNS": "200",
            killers.SITE: str(directory),
        }
        self._api = httpx.Client(base_url=f"{address}/api", timeout=60)
        self.scripts: list[subprocess.Popen[bytes]] = []

    # --- processes

    def deploy(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the set-up script, in a process group of its own; it is ended by :meth:`close`."""
        with (self.directory / f"deploy-{len(self.scripts)}.log").open("wb") as log:
            script = subprocess.Popen(
                ["bash", "infra/deploy", *arguments],
                cwd=ROOT,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.scripts.append(script)
        return script

    def start_worker(self) -> None:
        self.deploy("worker")
        self.wait(self.worker_started)

    def worker_started(self) -> bool:
        """Whether the worker of the newest script has said that it looks for runs."""
        return b"started!" in (self.directory / f"deploy-{len(self.scripts) - 1}.log").read_bytes()

    def leftovers(self) -> dict[int, str]:
        """Processes of flows and their engines: all that are marked, but for the scripts and what those started."""
        own = {script.pid for script in self.scripts}
        found = marked(self.directory).items()
        return {pid: command for pid, command in found if pid not in own and parent(pid) not in own}

    def close(self) -> None:
        for script in self.scripts:
            script.terminate()
        for script in self.scripts:
            script.wait(timeout=60)
        self._api.close()

    def prefect(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command line of Prefect, as a user types it."""
        return self.run(sys.executable, "-m", "prefect", "--no-prompt", *arguments)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=600, check=False
        )

    # --- the server

    def get(self, path: str) -> Any:
        return self._api.get(path).raise_for_status().json()

    def post(self, path: str, **values: Any) -> Any:
        # A server on SQLite answers so while its database is locked; Prefect's own client asks again, too.
        answer = self.wait(lambda: (got := self._api.post(path, json=values)).status_code != 503 and got)
        return answer.raise_for_status().json()

    def post_events(self, events: list[dict[str, Any]]) -> None:
        self._api.post("/events", json=events).raise_for_status()

    def wait(self, condition: Callable[[], Any]) -> Any:
        """The first true value of a condition."""
        deadline = time.monotonic() + SECONDS
        while not (value := condition()):
            logs = sorted(self.directory.glob("deploy-*.log"))
            assert time.monotonic() < deadline, logs[-1].read_text()[-4000:]
            time.sleep(0.3)  # each look costs the server some of the time that the run needs
        return value

    def add_scripted(self) -> None:
        """Beside extract/smollm2-cpu, a deployment of the same flow whose stage follows a script."""
        known = self.get("/deployments/name/extract/smollm2-cpu")
        copied = ("flow_id", "work_pool_name", "pull_steps", "parameter_openapi_schema", "job_variables")
        values = {name: known[name] for name in copied}
        self.post("/deployments/", name="scripted", entrypoint="tests/flows/scripted.py:extract", **values)

    def script(self, *entries: str) -> None:
        """What shall happen in the next run: ``length.action.committed`` (see tests.flows.killers)."""
        for file in ("ending", "holding"):
            (self.directory / file).unlink(missing_ok=True)
        for number, entry in enumerate(entries):
            (self.directory / "script" / f"{number}.{entry}").touch()

    @property
    def script_left(self) -> list[str]:
        return sorted(path.name for path in (self.directory / "script").iterdir())

    def start(self, extraction: Extraction) -> str:
        """Ask for a run of the scripted deployment; gives its id."""
        deployment = self.get("/deployments/name/extract/scripted")["id"]
        parameters = {"extraction": extraction.model_dump(mode="json")}
        return str(self.post(f"/deployments/{deployment}/create_flow_run", parameters=parameters)["id"])

    def state(self, run: str) -> tuple[str, str]:
        """Name and message of a run's state."""
        state = self.get(f"/flow_runs/{run}")["state"]
        return state["name"], state["message"] or ""

    def ended(self, run: str) -> tuple[str, str]:
        """Wait for the end of a run."""
        final = ("Completed", "Failed", "Crashed", "Cancelled")
        return self.wait(lambda: (found := self.state(run))[0] in final and found)  # type: ignore[no-any-return]

    def chunks(self, run: str, step: str = "extract") -> dict[str, dict[str, Any]]:
        """Name of the chunk -> the newest task run of this step, once all have ended."""
        named = {"flow_runs": {"id": {"any_": [run]}}, "sort": "EXPECTED_START_TIME_ASC", "limit": 200}

        def found() -> dict[str, dict[str, Any]]:
            runs = [r for r in self.post("/task_runs/filter", **named) if r["name"].startswith(f"{step} chunk-")]
            done = all(r["state_type"] in ("COMPLETED", "FAILED", "CRASHED") for r in runs)
            return {r["name"].removeprefix(f"{step} "): r for r in runs} if done else {}

        return self.wait(found)  # type: ignore[no-any-return]

    def artifacts(self, run: str) -> dict[str, Any]:
        """Key -> newest artifact of a run."""
        found = self.post("/artifacts/filter", flow_runs={"id": {"any_": [run]}}, sort="UPDATED_DESC", limit=200)
        return {artifact["key"]: artifact for artifact in reversed(found)}

    def logs(self, run: str) -> list[str]:
        """Logger and message of each record of a run, in order."""
        found: list[Any] = []
        named = {"logs": {"flow_run_id": {"any_": [run]}}, "sort": "TIMESTAMP_ASC", "limit": 200}
        while page := self.post("/logs/filter", offset=len(found), **named):
            found += page
        return [f"{entry['name']}: {entry['message']}" for entry in found]
