"""What is known of a shard's run, from a real server: no worker is needed to issue, watch, give up and cancel."""

import time
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.states import Pending, Running

from tasks.fleet import task as fleet_task
from tasks.fleet.follow import Sight
from tasks.fleet.task import HEARTBEAT, DeploymentNodes
from tasks.plan.shards import Shard
from tests.flows.nodes import deploy

SHARD = Shard(group="quick-fleet", index=1, count=2, first="8" * 64)


@pytest.fixture(scope="module")
def deployment(prefect_server: str) -> str:
    return deploy("no-workers", "flows/extract.py:extract")


def set_state(run: UUID, state: "State[None]") -> None:
    with get_client(sync_client=True) as client:
        client.set_flow_run_state(run, state, force=True)


def beat(run: UUID) -> None:
    emit_event(event=HEARTBEAT, resource={"prefect.resource.id": f"prefect.flow-run.{run}"})


def seen_after(nodes: DeploymentNodes, run: str, last: str | None) -> str:
    deadline = time.monotonic() + 60
    while (sight := nodes.look(run)) is None or sight.beat in (None, last):
        assert time.monotonic() < deadline, "the heartbeat did not arrive"
        time.sleep(0.2)
    return sight.beat


def test_a_run_is_watched_by_its_state_and_its_heartbeats(deployment: str) -> None:
    extraction = {"model": {"path": "m"}, "layers": {"ids": [1], "convention": "input"}, "store": "s"}
    extraction["data"] = {"path": "d.jsonl"}
    nodes = DeploymentNodes(deployment, {"extraction": extraction})
    run = nodes.issue(SHARD, 1)
    assert run == "quick-fleet-shard-001"
    assert nodes.issue(SHARD, 2) == "quick-fleet-shard-001-again-2"
    assert nodes.look(run) == Sight("scheduled", "Scheduled")
    run_id = nodes._ids[run]
    with get_client(sync_client=True) as client:
        assert client.read_flow_run(run_id).parameters["shard"] == SHARD.model_dump()

    set_state(run_id, Pending())
    assert nodes.look(run) == Sight("pending", "Pending")
    set_state(run_id, Running())
    assert nodes.look(run) == Sight("running", "Running", beat=None)
    beat(run_id)
    first = seen_after(nodes, run, None)
    beat(run_id)
    assert seen_after(nodes, run, first) != first

    nodes.give_up(run, "no sign of life for 30 s")
    sight = nodes.look(run)
    assert sight == Sight("crashed", "the node is taken for dead: no sign of life for 30 s")
    again = "quick-fleet-shard-001-again-2"
    nodes.cancel(again)
    sight = nodes.look(again)
    assert sight is not None
    assert sight.state in ("cancelling", "cancelled")
    with get_client(sync_client=True) as client:
        client.delete_flow_run(nodes._ids[again])
    assert nodes.look(again) == Sight("cancelled", "its run was deleted")


def test_all_runs_are_asked_for_at_once(deployment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_task, "EVENTS_AT_ONCE", 1)
    nodes = DeploymentNodes(deployment, {})
    runs = [nodes.issue(SHARD.model_copy(update={"index": index}), 1) for index in range(3)]
    ids = [nodes._ids[run] for run in runs]
    for each in ids:
        set_state(each, Running())
    beats = dict.fromkeys(runs, "")
    for _ in range(2):  # of the second round, none hides the others
        for each in ids:
            beat(each)
        beats = {run: seen_after(nodes, run, beats[run]) for run in runs}
    assert len(set(beats.values())) == len(runs)

    asked = DeploymentNodes(deployment, {}, states_s=1000, beats_s=1000)
    asked._ids = dict(nodes._ids)
    seen = asked.look(runs[0])
    assert seen is not None
    assert seen.state == "running"
    with monkeypatch.context() as patch:
        patch.setattr(fleet_task, "get_client", lambda **_: pytest.fail("they were asked for a moment ago"))
        sights = [asked.look(run) for run in runs]
    assert [sight and sight.state for sight in sights] == ["running"] * len(runs)


def test_a_server_that_does_not_answer_tells_nothing(deployment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = DeploymentNodes(deployment, {})
    nodes._ids["run"] = UUID(int=1)

    def away(**_: object) -> None:
        raise httpx.ConnectError("away")

    monkeypatch.setattr(fleet_task, "get_client", away)
    assert nodes.look("run") is None
