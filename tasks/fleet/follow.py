"""One shard from its first issue to its end, whatever becomes of the nodes that work on it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Protocol

from tasks.plan.shards import Shard
from tasks.report.log import logger

PENDING_S = 300.0
"""A node that has accepted a shard starts its process within this time, or is dead."""


@dataclass(frozen=True)
class Sight:
    """What is known of a shard's run at a moment."""

    state: str
    """Type of its state, in lower case: ``scheduled``, ``pending``, ``running``, ``paused``, ``completed``, ..."""
    message: str = ""
    beat: str | None = None
    """Tells its newest heartbeat from the one before; None if it has sent none."""

    @property
    def ended(self) -> bool:
        return self.state in ("completed", "failed", "crashed", "cancelled")


class Nodes(Protocol):
    """Where shards are run."""

    def issue(self, shard: Shard, attempt: int) -> str:
        """Let a free node run the shard; returns the name of the run."""

    def look(self, run: str) -> Sight | None:
        """What is known of a run now; None if nothing can be learned at the moment."""

    def give_up(self, run: str, reason: str) -> None:
        """Note that a run is dead, so that nobody waits for it."""

    def cancel(self, run: str) -> None:
        """Stop a run."""


@dataclass
class ShardEnd:
    """What became of one shard."""

    shard: Shard
    state: str = "not run"
    message: str = ""
    runs: list[str] = field(default_factory=list)
    """Names of its runs; more than one where nodes died."""

    @property
    def completed(self) -> bool:
        return self.state == "completed"


def follow(
    shard: Shard,
    nodes: Nodes,
    *,
    attempts: int,
    silence_s: float,
    stop: threading.Event,
    poll_s: float = 5.0,
    clock: Callable[[], float] = monotonic,
) -> ShardEnd:
    """Issue a shard, and issue it again whenever its node dies.

    A node is dead if its run has Crashed, or if it has sent heartbeats and then none for ``silence_s`` by this
    process's own clock. A run that Failed is not issued again: its node lives and has done what it could.

    Args:
        shard: to be run.
        nodes: that run it.
        attempts: how often it is issued at most.
        silence_s: seconds without a heartbeat after which a node is dead.
        stop: when set, the shard is cancelled.
        poll_s: seconds between two looks.
        clock: seconds, from any start.
    """
    end = ShardEnd(shard)
    while len(end.runs) < attempts:
        run = nodes.issue(shard, len(end.runs) + 1)
        end.runs.append(run)
        sight = _until_ended(run, nodes, silence_s, stop, poll_s, clock)
        end.state, end.message = sight.state, sight.message
        if sight.state != "crashed":
            break
        again = "it is issued again" if len(end.runs) < attempts else f"given up after {attempts} attempts"
        logger.warning(f"{shard.name}: the node of {run} died ({sight.message}); {again}")
    return end


def _until_ended(
    run: str, nodes: Nodes, silence_s: float, stop: threading.Event, poll_s: float, clock: Callable[[], float]
) -> Sight:
    last: Sight | None = None
    changed = clock()
    while True:
        sight = nodes.look(run)
        if sight is not None and sight.ended:
            return sight
        if sight is None or sight != last:  # while nothing can be learned, nobody is silent
            changed = clock()
            last = sight or last
        elif (limit := _patience(sight, silence_s)) is not None and clock() - changed > limit:
            reason = f"no sign of life for {limit:.0f} s"
            nodes.give_up(run, reason)
            return Sight("crashed", reason)
        if stop.wait(poll_s):
            nodes.cancel(run)
            return Sight("cancelled", "the fleet was stopped")


def _patience(sight: Sight, silence_s: float) -> float | None:
    """Seconds without a change after which the run is dead; None if it may stay like this for ever."""
    match sight.state:
        case "pending":
            return max(silence_s, PENDING_S)
        case "running" | "cancelling" if sight.beat is not None:
            return silence_s
        case _:  # waiting for a free node, paused by a person, or on a node that sends no heartbeats
            return None
