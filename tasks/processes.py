"""Processes that end with the one that they work for."""

import os
import select
import threading
from collections.abc import Callable


def when_gone(pid: int, then: Callable[[], None]) -> None:
    """Call ``then``, on a thread of its own, as soon as a process is gone, however it ended.

    Raises:
        ProcessLookupError: it is gone already.
    """
    descriptor = os.pidfd_open(pid)

    def wait() -> None:
        select.select([descriptor], [], [])  # a process descriptor becomes readable when the process ends
        then()

    threading.Thread(target=wait, name=f"layertap-watch-{pid}", daemon=True).start()
