"""A command that is interrupted or told to end: it ends in order, and one sentence says how far it has come."""

import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from rich.logging import RichHandler

from tasks.report.log import logger

T = TypeVar("T")

END_SECONDS = 8.0  # for what is under way; then the process ends as it is, which harms nothing that is committed
CLEAN = "\r\x1b[K\x1b[?25h"
DRAIN_SECONDS = 3.0  # for what the Prefect server has not been told yet

_standing: Callable[[], str] = str


def standing(tell: Callable[[], str]) -> None:
    """Let an interrupt say how far the run has come; ``tell`` is called when everything has ended, or nearly so."""
    global _standing
    _standing = tell


def interruptible(work: Callable[[], T]) -> T:
    """Do the work, on the main thread; an interrupt ends it in order, and then the process; so does SIGTERM.

    A second signal ends the process at once. While a flow runs, SIGTERM is Prefect's, which ends the flow in order and
    then sends it again.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return work()  # told to ignore interrupts, as by nohup; or somebody else minds them
    signals = 0

    def interrupt(number: int, frame: Any) -> None:
        global _exit_code
        nonlocal signals
        signals += 1
        _exit_code = 128 + number  # as shells report it
        if signals > 1:
            _leave()
        for handler in logger.handlers:
            if isinstance(handler, RichHandler):
                handler.setLevel(logging.CRITICAL + 1)  # what now fails was told to
        patience.start()
        raise KeyboardInterrupt

    patience = threading.Timer(END_SECONDS, _leave)
    patience.daemon = True
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return work()
    except KeyboardInterrupt:
        _drain()
        _leave()
        raise  # not reached
    finally:
        patience.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def _drain() -> None:
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (EventsWorker, APILogWorker):
        with suppress(Exception):
            worker.drain_all(timeout=DRAIN_SECONDS)


_leaving = threading.RLock()
_told = False
_exit_code = 0


def _leave() -> None:
    """Say how far the run has come, and end the process.

    Not by way of Python's end, which would wait for threads that themselves wait for something.
    """
    global _told
    if not _leaving.acquire(blocking=False):
        threading.Event().wait()  # for the other thread to end the process
    if not _told:
        _told = True
        told = ""
        with suppress(Exception):
            told = _standing()
        sentence = "; ".join(filter(None, ("interrupted", told, "run the same command again to go on")))
        # A progress bar that has not ended leaves its line and a hidden cursor.
        os.write(2, f"{CLEAN if os.isatty(2) else ''}{sentence}\n".encode())
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(_exit_code)
