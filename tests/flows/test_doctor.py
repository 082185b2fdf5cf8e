"""What is said of a Prefect server on which runs would not be run, or not be shown."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prefect.client.schemas.objects import WorkerStatus
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from flows import doctor
from flows.cli import app


@contextmanager
def server(**answers: object) -> Iterator[str]:
    """A server that gives these answers, by the last part of the path, and is no Prefect."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.rpartition("/")[2].replace("-", "_"))
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}/api"
        finally:
            listening.shutdown()


def asked(address: str | None) -> tuple[int, str]:
    with temporary_settings({PREFECT_API_URL: address}):
        result = CliRunner().invoke(app, ["doctor", "--prefect"], env={"COLUMNS": "300"})
    return result.exit_code, result.output


def test_no_server_is_named() -> None:
    code, told = asked(None)
    assert code == 1
    assert "PREFECT_API_URL is not set" in told
    assert "nothing would ever run it" in told
    assert "bash infra/deploy" in told


def test_no_server_answers() -> None:
    with server() as address:
        pass
    code, told = asked(address)
    assert code == 1
    assert f"no Prefect server answers at PREFECT_API_URL={address}" in told


@pytest.mark.parametrize(
    "command",
    [
        ["extract", "smollm2-cpu"],
        ["fleet", "smollm2-cpu", "--deployment", "extract/x"],
        ["audit", "store"],
        ["export", "store", "out", "--to", "safetensors"],
        ["import", ".", "store", "--from", "speculators", "--model", "m"],
        ["pause", "a-run"],
        ["resume", "a-run"],
    ],
    ids=lambda command: command[0],
)
def test_a_verb_that_needs_the_server_says_so_when_none_answers(command: list[str]) -> None:
    with server() as address:
        pass
    with temporary_settings({PREFECT_API_URL: address}):
        result = CliRunner().invoke(app, command, env={"COLUMNS": "300"})
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert f"error: no Prefect server answers at PREFECT_API_URL={address}" in result.output
    assert "correct the address; or unset it" in result.output


@pytest.mark.parametrize(
    ("address", "why"), [("http://host:port/api", "Invalid port"), ("127.0.0.1:4200/api", "protocol")]
)
def test_what_is_no_address_has_no_server(address: str, why: str) -> None:
    problem = doctor.no_answer(address)
    assert problem is not None
    assert why in problem.what


def test_a_server_that_answers_is_no_problem() -> None:
    with server(health=True) as address:
        assert doctor.no_answer(address) is None
    with server() as address:
        problem = doctor.no_answer(address)
    assert problem is not None
    assert "404" in problem.what


def test_the_ui_asks_elsewhere() -> None:
    with server(ui_settings={"api_url": "http://127.0.0.1:4200/api"}) as address:
        (problem,) = doctor._ui(address)
    assert "ask for data at http://127.0.0.1:4200/api" in problem.what
    assert f"PREFECT_SERVER_API_PORT={address.rpartition(':')[2].removesuffix('/api')}" in problem.remedy


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_the_ui_may_ask_by_another_name_of_the_host(name: str) -> None:
    answers: dict[str, str] = {}
    with server(ui_settings=answers) as address:
        answers["api_url"] = address.replace("127.0.0.1", name)
        assert list(doctor._ui(address)) == []


@pytest.mark.parametrize(
    ("paused", "workers", "told"),
    [
        (False, {"node-1": "ONLINE", "node-2": "OFFLINE"}, []),
        (False, {}, ["no worker of the work pool layertap is alive, so runs stay Late"]),
        (False, {"node-1": "OFFLINE"}, ["no worker of the work pool layertap is alive, so runs stay Late; last"]),
        (True, {"node-1": "ONLINE"}, ["the work pool layertap is paused"]),
    ],
)
def test_a_pool_that_works_nothing_off(paused: bool, workers: dict[str, str], told: list[str]) -> None:
    client: Any = SimpleNamespace(
        read_work_pool=lambda name: SimpleNamespace(is_paused=paused),
        read_workers_for_work_pool=lambda name: [
            SimpleNamespace(name=worker, status=WorkerStatus(status)) for worker, status in workers.items()
        ],
    )
    problems = list(doctor._pool(client))
    assert len(problems) == len(told)
    for problem, expected in zip(problems, told, strict=True):
        assert problem.what.startswith(expected)
        assert problem.remedy


@pytest.mark.engine
def test_a_server_on_which_nothing_is_set_up(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "POOL", "of-another-name")
    monkeypatch.setattr(doctor, "INFRA", tmp_path)
    (tmp_path / "prefect.yaml").write_text("deployments: [{name: mine, entrypoint: 'flows/my.py:extract_fleet'}]")
    (tmp_path / "automations.yaml").write_text("automations: [{name: of-another-name}]")
    code, told = asked(f"{prefect_server}/api")
    assert code == 1
    assert "there is no work pool of-another-name" in told
    assert "the deployment extract-fleet/mine is missing" in told
    assert "the automation of-another-name is missing or disabled" in told
    assert told.count("run `bash infra/deploy setup`") == 3


def test_files_or_the_server_must_be_named() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
