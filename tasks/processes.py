"""Processes that end with the one that they work for, and the other way round."""

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress


class Process:
    """A running process; unlike its number, this never comes to mean another one."""

    def __init__(self, pid: int) -> None:
        """Take hold of a process; ProcessLookupError if it is gone already."""
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def gone(self, seconds: float | None = None) -> bool:
        """Wait until it is gone, however it ended, no longer than given."""
        # A process descriptor becomes readable when the process ends.
        return bool(select.select([self._descriptor], [], [], seconds)[0])

    def kill(self) -> None:
        """End it at once; nothing happens if it is gone."""
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, signal.SIGKILL)

    def when_gone(self, then: Callable[[], None]) -> None:
        """Call ``then``, on a thread of its own, as soon as it is gone."""

        def wait() -> None:
            self.gone()
            then()

        threading.Thread(target=wait, name=f"layertap-watch-{self.pid}", daemon=True).start()

    def __del__(self) -> None:
        with suppress(AttributeError, OSError):
            os.close(self._descriptor)
