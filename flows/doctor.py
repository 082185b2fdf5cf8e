"""What is wrong with the Prefect that deployments run on, and what to do about it."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import get_current_settings

INFRA = Path(__file__).resolve().parent.parent / "infra"
POOL = "layertap"
ANSWER_S = 10.0
SET_UP = "run `bash infra/deploy setup`"


@dataclass(frozen=True)
class Problem:
    """Something that keeps runs from being run, or shown."""

    what: str
    remedy: str


def examine() -> list[Problem]:
    """All problems of the server at ``PREFECT_API_URL``; none if runs of the deployments will be run."""
    address = get_current_settings().api.url
    if not address:
        return [
            Problem(
                "PREFECT_API_URL is not set. `prefect deployment run` would note the run in a database of its own and "
                "end with 0, and nothing would ever run it",
                "start `bash infra/deploy`, and export the PREFECT_API_URL that it prints",
            )
        ]
    if problem := no_answer(address):
        return [problem]
    with get_client(sync_client=True) as client:
        return [*_ui(address), *_pool(client), *_deployments(client), *_automations(client)]


def no_answer(address: str) -> Problem | None:
    """That no server is at this address, if so; one that wants another sign-in than this request's is there."""
    try:
        answer = httpx.get(f"{address}/health", timeout=ANSWER_S)
        if answer.status_code != httpx.codes.NOT_FOUND and not answer.is_server_error:
            return None
        why = f"{answer.status_code} {answer.reason_phrase}"
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error)
    return Problem(
        f"no Prefect server answers at PREFECT_API_URL={address} ({why})",
        "correct the address; or unset it and run `bash infra/deploy`, which then starts a server",
    )


def _ui(address: str) -> Iterator[Problem]:
    """A server that was told its port by ``--port`` alone serves pages that ask at another."""
    try:
        answer = httpx.get(f"{address.removesuffix('/api')}/ui-settings", timeout=10)
        asks = str(answer.json()["api_url"])
    except (httpx.HTTPError, ValueError, KeyError):
        return  # a server without a UI
    ports = {url.port or {"https": 443}.get(url.scheme, 80) for url in map(urlsplit, (asks, address))}
    if len(ports) > 1:
        port = urlsplit(address).port
        yield Problem(
            f"the pages of the UI ask for data at {asks}, but the server is at {address}: they stay empty",
            f"start the server with PREFECT_SERVER_API_PORT={port}; behind a proxy, with PREFECT_UI_API_URL={address}",
        )


def _pool(client: SyncPrefectClient) -> Iterator[Problem]:
    try:
        pool = client.read_work_pool(POOL)
    except ObjectNotFound:
        yield Problem(f"there is no work pool {POOL}, so runs have nowhere to wait", SET_UP)
        return
    if pool.is_paused:
        yield Problem(f"the work pool {POOL} is paused", f"run `prefect work-pool resume {POOL}`")
    workers = client.read_workers_for_work_pool(POOL)
    if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
        known = f"; last heard of: {', '.join(worker.name for worker in workers)}" if workers else ""
        yield Problem(
            f"no worker of the work pool {POOL} is alive, so runs stay Late{known}",
            "run `bash infra/deploy worker` on the machine with the GPUs",
        )


def _deployments(client: SyncPrefectClient) -> Iterator[Problem]:
    for wanted in _read("prefect.yaml")["deployments"]:
        # The flow is named as its function, with dashes.
        name = f"{wanted['entrypoint'].rpartition(':')[2].replace('_', '-')}/{wanted['name']}"
        try:
            client.read_deployment_by_name(name)
        except ObjectNotFound:
            yield Problem(f"the deployment {name} is missing", SET_UP)


def _automations(client: SyncPrefectClient) -> Iterator[Problem]:
    for wanted in _read("automations.yaml")["automations"]:
        name = wanted["name"]
        if not any(present.enabled for present in client.read_automations_by_name(name)):
            yield Problem(
                f"the automation {name} is missing or disabled: runs whose machine dies stay Running for ever",
                SET_UP,
            )


def _read(file: str) -> Any:
    return yaml.safe_load((INFRA / file).read_text(encoding="utf-8"))
