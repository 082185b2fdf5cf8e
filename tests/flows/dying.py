"""The flow ``extract`` and the Ray node as they are, except that a scripted node kills itself before a commit.

The fault is scripted in a file that the first run to reach the point removes, so that it happens once: the shard's
name, the number of the commit, from 1, and what dies: the ``process`` of the run, or with it the ``node``, which is the
worker's whole process group.
"""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path

from flows.extract import extract
from flows.node import Node
from tasks.store.store import StagedSample, Store

SCRIPT = "LAYERTAP_TEST_KILL_SCRIPT"
LOG = "LAYERTAP_TEST_COMMIT_LOG"
"""A file that takes a line for each sample that a node is about to commit: its shard, process and key."""

_commit = Store.commit
_commits = 0
_one_at_a_time = threading.Lock()  # so that the commits before the fatal one are over


def commit(store: Store, samples: Sequence[StagedSample]) -> list[str]:
    global _commits
    with _one_at_a_time:
        _commits += 1
        script = Path(os.environ[SCRIPT])
        share = store.share.name if store.share else ""
        if script.exists():
            at_share, at_commit, what = script.read_text().split()
            if (share, _commits) == (at_share, int(at_commit)):
                script.unlink()
                if what == "node":
                    os.killpg(os.getpgrp(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        committed = _commit(store, samples)
        with Path(os.environ[LOG]).open("a") as log:
            log.writelines(f"{share} {os.getpid()} {key}\n" for key in committed)
        return committed


if SCRIPT in os.environ:  # not in the tests' own process
    Store.commit = commit  # type: ignore[method-assign]


class DyingNode(Node):
    """By its name, Ray's processes find this module."""


__all__ = ["DyingNode", "extract"]
