"""A shard is followed to its end, through the deaths of nodes that are scripted here."""

import threading
from collections.abc import Iterator

import pytest

from tasks.fleet.follow import PENDING_S, ShardEnd, Sight, follow
from tasks.plan.shards import Shard

SHARD = Shard(group="fleet", index=0, count=2)
POLL = 10.0  # seconds of the scripted clock from one look to the next


class Clock:
    """Time passes only when the follower waits."""

    def __init__(self, stop_after: float = 1e9) -> None:
        self.now = 0.0
        self.stop_after = stop_after

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float | None = None) -> bool:
        self.now += seconds or 0
        return self.now >= self.stop_after


class ScriptedNodes:
    """Runs that are seen as the script says, one list for each time the shard is issued."""

    def __init__(self, *script: list[Sight | None]) -> None:
        self._script = script
        self._sights: dict[str, Iterator[Sight | None]] = {}
        self.log: list[str] = []

    def issue(self, shard: Shard, attempt: int) -> str:
        run = f"{shard.name}-{attempt}"
        self._sights[run] = iter(self._script[attempt - 1])
        self.log.append(f"issue {run}")
        return run

    def look(self, run: str) -> Sight | None:
        return next(self._sights[run])

    def give_up(self, run: str, reason: str) -> None:
        self.log.append(f"give up {run}: {reason}")

    def cancel(self, run: str) -> None:
        self.log.append(f"cancel {run}")


def running(beat: int | None) -> Sight:
    return Sight("running", beat=None if beat is None else str(beat))


SCHEDULED, PENDING, PAUSED = Sight("scheduled"), Sight("pending"), Sight("paused", "Paused")
DONE, FAILED, CRASHED = Sight("completed", "5 extracted"), Sight("failed", "1 quarantined"), Sight("crashed", "killed")


def end_of(nodes: ScriptedNodes, clock: Clock | None = None, attempts: int = 3) -> ShardEnd:
    clock = clock or Clock()
    stop = threading.Event()
    stop.wait = clock.wait  # type: ignore[method-assign]
    return follow(SHARD, nodes, attempts=attempts, silence_s=30, stop=stop, poll_s=POLL, clock=clock)


def test_a_shard_is_issued_once_if_nothing_happens() -> None:
    nodes = ScriptedNodes([SCHEDULED] * 1000 + [PENDING, running(None), *map(running, range(50)), DONE])
    end = end_of(nodes)
    assert (end.completed, end.message, end.runs) == (True, "5 extracted", ["shard-000-1"])
    assert nodes.log == ["issue shard-000-1"]


def test_a_crashed_run_is_issued_again() -> None:
    end = end_of(ScriptedNodes([running(1), CRASHED], [PENDING, CRASHED], [running(1), DONE]))
    assert (end.completed, end.runs) == (True, ["shard-000-1", "shard-000-2", "shard-000-3"])


def test_a_silent_node_is_given_up_and_its_shard_issued_again() -> None:
    nodes = ScriptedNodes([running(1), running(2)] + [running(2)] * 9, [DONE])
    end = end_of(nodes)
    assert end.completed
    assert nodes.log == ["issue shard-000-1", "give up shard-000-1: no sign of life for 30 s", "issue shard-000-2"]


def test_a_node_that_accepted_a_shard_and_never_began_is_given_up() -> None:
    nodes = ScriptedNodes([PENDING] * int(PENDING_S / POLL + 3), [DONE])
    assert end_of(nodes).completed
    assert nodes.log[1] == f"give up shard-000-1: no sign of life for {PENDING_S:.0f} s"


@pytest.mark.parametrize("sight", [running(None), PAUSED, SCHEDULED], ids=["no heartbeats", "paused", "no free node"])
def test_who_does_not_have_to_speak_is_not_silent(sight: Sight) -> None:
    nodes = ScriptedNodes([sight] * 500 + [DONE])
    assert end_of(nodes).completed
    assert nodes.log == ["issue shard-000-1"]


def test_a_server_that_is_away_tells_nothing_of_the_node() -> None:
    nodes = ScriptedNodes([running(1)] + [None] * 100 + [running(1), running(1), running(2), DONE])
    assert end_of(nodes).completed
    assert len(nodes.log) == 1


def test_a_failed_run_is_not_issued_again() -> None:
    end = end_of(ScriptedNodes([running(1), FAILED], [DONE]))
    assert (end.state, end.message, len(end.runs)) == ("failed", "1 quarantined", 1)


def test_a_shard_is_given_up_after_some_attempts() -> None:
    end = end_of(ScriptedNodes([CRASHED], [CRASHED], [DONE]), attempts=2)
    assert (end.state, len(end.runs)) == ("crashed", 2)


def test_a_fleet_that_is_stopped_cancels_its_runs() -> None:
    nodes = ScriptedNodes([running(n) for n in range(100)])
    end = end_of(nodes, Clock(stop_after=35))
    assert end.state == "cancelled"
    assert nodes.log == ["issue shard-000-1", "cancel shard-000-1"]
