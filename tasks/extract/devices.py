"""One engine at a time on each device of a node; a second one waits."""

import fcntl
import json
import os
import re
import tempfile
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from tasks.report.log import logger

NODE_VARIABLE = "LAYERTAP_NODE"
"""Names one of several nodes that share a machine; engines of different nodes do not wait for each other."""
POLL_S = 1.0


def engine_devices(count: int, visible: str | None, on_cpu: bool) -> list[str]:
    """Names of the devices that an engine uses.

    Args:
        count: ranks of tensor parallelism.
        visible: value of the variable that says which GPUs this process may use, such as ``CUDA_VISIBLE_DEVICES``.
        on_cpu: whether the engine runs on the processor; it then uses all cores that this process may run on.
    """
    if on_cpu:
        return [f"cpu-{core}" for core in sorted(os.sched_getaffinity(0))]
    names = [name.strip() for name in visible.split(",")] if visible else [str(i) for i in range(count)]
    return [f"gpu-{re.sub('[^A-Za-z0-9-]', '_', name)}" for name in names[:count]]


class Devices:
    """Locks on devices, which end with this process however it ends; for all users of a machine."""

    def __init__(self, owner: str) -> None:
        """Take nothing yet.

        Args:
            owner: Who will hold the devices, for those who wait.
        """
        self._owner = owner
        self._held: list[int] = []
        self._directory = Path(tempfile.gettempdir()) / "layertap-devices"

    def take(self, devices: Sequence[str], stop: threading.Event) -> bool:
        """Wait until no other engine uses any of the devices, and say for whom; returns False once ``stop`` is set."""
        node = os.environ.get(NODE_VARIABLE, "")
        for device in sorted(devices):  # in one order everywhere, or two engines could wait for each other
            path = self._directory / re.sub("[^A-Za-z0-9._-]", "_", f"{node}-{device}" if node else device)
            descriptor = _open(path)
            self._held.append(descriptor)
            told = ""
            while not _lock(descriptor):
                holder = _holder(descriptor)
                if holder != told:
                    logger.warning(f"{device} is in use by {holder}; waiting for it to end")
                    told = holder
                if stop.wait(POLL_S):
                    self.release()
                    return False
            since = datetime.now().astimezone().isoformat(timespec="seconds")
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps({"owner": self._owner, "pid": os.getpid(), "since": since}).encode(), 0)
        return True

    def release(self) -> None:
        """Let the next engine have the devices. Safe to call twice."""
        while self._held:
            os.close(self._held.pop())


def _open(path: Path) -> int:
    """Open a file that all users of this machine can lock, made by whoever is first."""
    if not path.parent.is_dir():
        path.parent.mkdir(exist_ok=True)
        path.parent.chmod(0o1777)
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
    while True:
        try:
            return os.open(path, flags)  # without O_CREAT, which Linux refuses for another user's file in such a place
        except FileNotFoundError:
            pass
        try:
            descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            continue
        os.fchmod(descriptor, 0o666)
        return descriptor


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _holder(descriptor: int) -> str:
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"the engine of {holder['owner']} (process {holder['pid']}, since {holder['since']})"
    except (ValueError, KeyError, TypeError):  # it has not written yet who it is
        return "another engine"
