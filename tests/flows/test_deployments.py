"""Deployments as a user has them: set up by the script, run by a worker, killed, retried, and shown in the UI."""

import json
import os
import re
import socket
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml

from flows.config import Extraction
from flows.doctor import examine
from infra import automations
from tasks.store import open as open_store
from tasks.store.maintenance import verify
from tests.browser import browser
from tests.checkpoints import checkpoint_path
from tests.flows.postgresql import count, postgresql
from tests.flows.site import ROOT, Site

pytestmark = pytest.mark.engine

OUTPUT = Path(__file__).parent.parent / "output"
LENGTHS = (40, 33, 1, 17, 25, 9)  # in chunks of at most 64 tokens: 40; 33, 1, 17; 25, 9


@pytest.fixture(scope="module")
def site(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The session's server, set up by the script, with a worker."""
    place = Site(prefect_server, tmp_path_factory.mktemp("site"))
    try:
        assert place.deploy("setup").wait(timeout=300) == 0, (place.directory / "deploy-0.log").read_text()
        place.add_scripted()
        place.start_worker()
        yield place
    finally:
        place.close()


def extraction(directory: Path, *, ranks: int = 1, in_process: bool = False) -> Extraction:
    directory.mkdir(exist_ok=True)
    rows = [{"id": f"row-{n}", "input_ids": list(range(1, n + 1))} for n in LENGTHS]
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama", ranks))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(directory / "chats.jsonl"), "processes": 1},
            "chunk_tokens": 64,
            "store": str(directory / "store"),
            "engine": {
                "tensor_parallel_size": ranks,
                "max_model_len": 64,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.1,
                "in_process": in_process,
                "staging_gib": 0.1,
                # A sample that is held by a script must not hold up the other chunks.
                "writer_threads": 4,
            },
        }
    )


def stored(wanted: Extraction) -> int:
    """Number of samples in the store, each of which is whole."""
    found = verify(wanted.store)
    assert (found.ok, found.leftovers) == (True, []), found
    return len(open_store(wanted.store))


def clean(site: Site) -> bool:
    """Whether no process of a flow or an engine is left; waits for those that are ending."""
    site.wait(lambda: not site.leftovers())
    return True


# --- the demo's own deployment


@pytest.fixture(scope="module")
def demo(site: Site) -> tuple[str, str]:
    """A run of extract/smollm2-cpu: its id, and what the command line said."""
    assert site.run(sys.executable, "-m", "infra.assets", "demo").returncode == 0
    parameters = {"limit": 3, "store": str(site.directory / "smollm2"), "chunk_tokens": 256}
    given = [part for name, value in parameters.items() for part in ("--param", f"{name}={value}")]
    ended = site.prefect("deployment", "run", "extract/smollm2-cpu", *given, "--watch", "--watch-timeout", "500")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    match = re.search(r"UUID: (\S+)", ended.stdout)
    assert match is not None, ended.stdout
    return match[1], ended.stdout


def test_the_demo_s_deployment_runs_to_its_end(site: Site, demo: tuple[str, str]) -> None:
    run, told = demo
    assert f"{site.address}/v2/runs/flow-run/{run}" in told
    assert site.state(run) == ("Completed", "3 extracted, 0 reused")
    chunks = site.chunks(run)
    assert {chunk["state_name"] for chunk in chunks.values()} == {"Completed"}
    assert set(site.chunks(run, "commit")) == set(chunks)
    artifacts = site.artifacts(run)
    assert set(artifacts) == {
        *(f"shape-audit-{chunk}" for chunk in chunks),
        *("extraction-progress", "extraction-summary", "sample-lengths", "state-sizes"),
    }
    assert artifacts["extraction-progress"]["data"] == 100.0
    assert "3/3 samples" in artifacts["extraction-progress"]["description"]
    assert "**3 extracted, 0 reused**" in artifacts["extraction-summary"]["data"]
    assert len(open_store(site.directory / "smollm2")) == 3
    assert clean(site)


def test_a_run_s_log_has_the_messages_of_the_project_and_of_the_engine(site: Site, demo: tuple[str, str]) -> None:
    logs = site.wait(lambda: [line for line in site.logs(demo[0]) if line.startswith("layertap")])
    assert any(line.startswith("layertap: room in ") for line in logs)
    assert f"layertap: this run: {site.address}/v2/runs/flow-run/{demo[0]}" in logs
    assert any(line.startswith("layertap.engine: ") and "model" in line for line in logs)


# --- a run that fails, and its retry


@pytest.fixture(scope="module")
def failed(site: Site) -> tuple[str, Extraction, dict[str, Any]]:
    """A run in which the disk is full for one chunk, one sample cannot be captured, and a disk error passes."""
    wanted = extraction(site.directory / "failed", in_process=True)
    site.script("40.disk-error.0", "17.fail.0", "17.fail.0", "25.disk-full.0")
    parameters = json.dumps({"extraction": wanted.model_dump(mode="json")})
    ended = site.prefect("deployment", "run", "extract/scripted", "--params", parameters, "--watch")
    assert ended.returncode == 1, ended.stdout + ended.stderr
    match = re.search(r"UUID: (\S+)", ended.stdout)
    assert match is not None, ended.stdout
    assert site.script_left == []
    return match[1], wanted, site.chunks(match[1])


def test_one_chunk_s_failure_stops_no_other(site: Site, failed: tuple[str, Extraction, dict[str, Any]]) -> None:
    run, wanted, chunks = failed
    first, second, third = sorted(chunks)
    name, message = site.state(run)
    assert (name, message) == ("Failed", f"1/3 chunks failed ({third}), 3 extracted, 0 reused, 1 quarantined")
    assert stored(wanted) == 3
    assert chunks[first]["run_count"] == 2, "a disk error may pass, so the chunk was tried again"
    assert chunks[second]["run_count"] == chunks[third]["run_count"] == 1
    assert "the disk is full; free space and run again" in chunks[third]["state"]["message"]
    assert third in site.artifacts(run)["extraction-summary"]["data"]


def test_a_retry_extracts_only_what_is_missing(site: Site, failed: tuple[str, Extraction, dict[str, Any]]) -> None:
    run, wanted, chunks = failed
    first, second, third = sorted(chunks)
    assert site.prefect("flow-run", "retry", run).returncode == 0
    site.wait(lambda: site.state(run)[0] == "Completed")
    assert site.state(run)[1] == "3 extracted, 3 reused"
    assert stored(wanted) == len(LENGTHS)

    def told() -> Any:
        found = site.chunks(run)
        states = {name: (found[name]["state_name"], found[name]["state"]["message"]) for name in (first, second, third)}
        return states if states[first][0] == "Cached" else None

    assert site.wait(told) == {
        first: ("Cached", "1/1 verified in store"),
        second: ("Completed", "1 extracted, 2 reused"),
        third: ("Completed", "2 extracted, 0 reused"),
    }
    assert clean(site)


# --- kills


@pytest.fixture(scope="module")
def survivor(site: Site) -> tuple[str, Extraction]:
    """A run with two ranks, of which first one rank is killed and then the process above both."""
    wanted = extraction(site.directory / "survivor", ranks=2)
    site.script("33.kill-rank.1", "25.kill-engine-core.1")
    run = site.start(wanted)
    site.ended(run)
    return run, wanted


def test_a_run_outlives_its_engine(site: Site, survivor: tuple[str, Extraction]) -> None:
    run, wanted = survivor
    assert site.state(run) == ("Completed", "6 extracted, 0 reused"), site.logs(run)[-5:]
    assert site.script_left == []
    assert clean(site)
    assert stored(wanted) == len(LENGTHS)
    logs = site.logs(run)
    assert sum("the engine died; starting another" in line for line in logs) == 2


def test_the_log_of_a_run_has_that_of_each_process_of_the_engine(site: Site, survivor: tuple[str, Extraction]) -> None:
    logs = site.logs(survivor[0])
    for process in ("EngineCore", "Worker_TP0", "Worker_TP1"):
        assert any(line.startswith(f"layertap.engine: {process}: ") for line in logs), process


def test_a_killed_run_leaves_no_process_and_no_half_sample_and_the_next_one_completes(
    site: Site, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = extraction(site.directory / "killed")
    lines = []
    before = 0
    for action, expected in (("kill-flow", "Crashed"), ("kill-worker", "Crashed"), ("hold", "Cancelled")):
        site.script(f"33.{action}.{max(1, before)}")
        run = site.start(wanted)
        if action == "hold":
            site.wait((site.directory / "holding").exists)
            assert site.leftovers(), "the flow and its engine are at work"
            assert site.prefect("flow-run", "cancel", run).returncode == 0
        name, message = site.ended(run)
        assert name == expected, (action, message)
        assert site.script_left == []
        assert clean(site)
        after = stored(wanted)
        assert before <= after < len(LENGTHS), "what was committed stays, and the chunk of the scripted sample is not"
        lines.append(f"{action:<12} {name:<10} {after}/{len(LENGTHS)} samples, all whole, no process left")
        if action == "kill-worker":
            site.start_worker()
        before = after
    site.script()
    run = site.start(wanted)
    assert site.ended(run) == ("Completed", f"{len(LENGTHS) - before} extracted, {before} reused")
    assert stored(wanted) == len(LENGTHS)
    assert list((Path(wanted.store) / ".layertap" / "staging").iterdir()) == []
    assert clean(site)
    with capsys.disabled():
        print("\n" + "\n".join(lines))


def test_a_run_without_heartbeats_is_marked_as_crashed(site: Site, demo: tuple[str, str]) -> None:
    """What the machine of a run says last is a heartbeat; then nothing."""
    resource = f"prefect.flow-run.{demo[0]}"
    told = {"event": {"name": ["prefect.flow-run.heartbeat"]}, "resource": {"id": [resource]}}
    heartbeat = site.wait(lambda: site.post("/events/filter", filter=told)["events"])[0]
    flows = {name: site.post("/flows/", name=name)["id"] for name in ("extract", "of-somebody-else")}
    runs = {
        name: site.post("/flow_runs/", flow_id=flow, state={"type": "RUNNING", "name": "Running"})["id"]
        for name, flow in flows.items()
    }
    (automation,) = automations.load()
    trigger: Any = automation.trigger
    assert trigger.within == timedelta(seconds=90)
    short = automation.model_copy(update={"trigger": trigger.model_copy(update={"within": timedelta(seconds=10)})})
    automations.apply([short])
    try:
        events = []
        for name, run in runs.items():
            related = [
                each | ({"prefect.resource.name": name} if each["prefect.resource.role"] == "flow" else {})
                for each in heartbeat["related"]
            ]
            events.append(
                {
                    "id": str(uuid4()),
                    "occurred": datetime.now(UTC).isoformat(),
                    "event": heartbeat["event"],
                    "resource": heartbeat["resource"] | {"prefect.resource.id": f"prefect.flow-run.{run}"},
                    "related": related,
                }
            )
        site.post_events(events)
        assert site.ended(runs["extract"])[0] == "Crashed"
        assert site.state(runs["of-somebody-else"])[0] == "Running"
    finally:
        automations.apply([automation])


# --- what is seen


def test_the_doctor_finds_nothing_wrong(site: Site) -> None:
    assert examine() == []


def test_a_browser_shows_the_run_a_chunk_s_audit_and_the_summary(
    site: Site, survivor: tuple[str, Extraction], failed: tuple[str, Extraction, dict[str, Any]], tmp_path: Path
) -> None:
    run = survivor[0]
    page = f"{site.address}/v2"
    chunk = sorted(site.chunks(run))[1]
    artifacts = site.artifacts(run)
    table = json.loads(artifacts[f"shape-audit-{chunk}"]["data"])

    def shows(*texts: str) -> None:
        for text in texts:
            window.wait_for(f"document.body.innerText.includes({json.dumps(text)})")

    with browser(tmp_path) as window:
        window.open(f"{page}/runs/flow-run/{run}?tab=TaskRuns")
        shows("Completed", f"extract {chunk}", f"verify {chunk}", f"commit {chunk}")
        window.screenshot(OUTPUT / "ui-run-chunks.png")
        window.open(f"{page}/runs/flow-run/{run}?tab=Artifacts")
        shows("extraction-progress", "6/6 samples", "extraction-summary", f"shape-audit-{chunk}")
        window.screenshot(OUTPUT / "ui-run-artifacts.png")
        window.open(f"{page}/runs/flow-run/{run}?tab=Logs")
        shows("layertap.engine", "MainProcess: ")
        window.screenshot(OUTPUT / "ui-run-log.png")
        window.open(f"{page}/artifacts/artifact/{artifacts[f'shape-audit-{chunk}']['id']}")
        shows("TP agreement", table[1]["sample"], table[1]["shape"], "2/2 equal")
        window.screenshot(OUTPUT / "ui-run-audit.png")
        window.open(f"{page}/artifacts/artifact/{artifacts['extraction-summary']['id']}")
        shows("6 extracted, 0 reused", "3, of which 0 failed")
        window.screenshot(OUTPUT / "ui-run-summary.png")
        window.open(f"{page}/runs/flow-run/{failed[0]}?tab=TaskRuns")
        shows("Cached")
        window.screenshot(OUTPUT / "ui-run-retried.png")


# --- other servers


def free_port() -> int:
    with closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def test_all_of_it_by_one_script_with_postgresql(survivor: tuple[str, Extraction], tmp_path: Path) -> None:
    """The script starts the server, too; here on PostgreSQL. The store is full, so no engine is needed."""
    port = free_port()
    with postgresql(free_port()) as database:
        place = Site(f"http://127.0.0.1:{port}", tmp_path)
        address = place.environment.pop("PREFECT_API_URL")
        place.environment |= {
            "LAYERTAP_PORT": str(port),
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"postgresql+asyncpg://{database}",
        }
        try:
            script = place.deploy()
            place.wait(place.worker_started)
            told = (tmp_path / "deploy-0.log").read_text()
            assert f"export PREFECT_API_URL={address}" in told
            log = tmp_path / "prefect" / f"layertap-server-{port}.log"
            assert f"the server's log: {log}" in told
            assert "Check out the dashboard" in log.read_text(), "it does not hide what the worker says"
            assert "Check out the dashboard" not in told
            place.environment["PREFECT_API_URL"] = address
            doctor = place.run(sys.executable, "-m", "flows.cli", "doctor", "--prefect")
            assert (doctor.returncode, "Prefect is set up" in doctor.stdout) == (0, True), doctor.stdout
            place.add_scripted()
            run = place.start(survivor[1])
            assert place.ended(run) == ("Completed", f"0 extracted, {len(LENGTHS)} reused")
            assert {chunk["state_name"] for chunk in place.chunks(run).values()} == {"Cached"}
            assert count(database, "flow_run") == 1
            place.wait(lambda: count(database, "task_run") == 6)  # tokenize, plan, three chunks and the report
            assert count(database, "deployment") == 5
            script.terminate()
            assert script.wait(timeout=120) == 143
            place.wait(lambda: not place.leftovers())
        finally:
            place.close()


def test_a_run_with_a_server_of_its_own_loses_no_record(survivor: tuple[str, Extraction], tmp_path: Path) -> None:
    """As `layertap extract` runs without PREFECT_API_URL, in a directory that is not the project's."""
    values = survivor[1].model_dump(mode="json") | {"chunk_tokens": 1}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(values))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    environment |= {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "flows.cli", "extract", "mine.yaml"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "flow-run" not in ended.stderr, "a server that is gone has no page to open"
    with closing(sqlite3.connect(tmp_path / "prefect" / "prefect.db")) as database:
        states = database.execute("select state_type, count(*) from task_run group by 1").fetchall()
        assert states == [("COMPLETED", 3 + len(LENGTHS))], "tokenize, plan, report and one task for each chunk"
        assert database.execute("select state_name from flow_run").fetchall() == [("Completed",)]
        assert database.execute("select count(*) from artifact where key = 'extraction-summary'").fetchone() == (1,)
        assert database.execute("select count(*) from log").fetchone()[0] > 0
