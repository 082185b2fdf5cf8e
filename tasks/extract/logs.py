"""What the engine's processes log, brought into the flow's process, where a run's log is kept.

vLLM's processes configure their loggers from a file that an environment variable names. Here that file names a handler
which sends each record through a socket to the process that owns the engine.
"""

import contextvars
import json
import logging
import logging.config
import os
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.report.log import logger

CONFIG_VARIABLE = "VLLM_LOGGING_CONFIG_PATH"
LEVEL_VARIABLE = "VLLM_LOGGING_LEVEL"
SOCKET_VARIABLE = "LAYERTAP_LOG_SOCKET"
"""Environment variable with the path of the socket; absent in processes that belong to no engine."""

LONGEST = 16_384  # characters of a record; a traceback of vLLM has a few thousand
SEND_SECONDS = 5.0  # an engine does not wait longer than this for its log to be taken

engine_logger = logger.getChild("engine")


class Forwarder(logging.Handler):
    """Sends records to the process that owns the engine; records of that process itself take the same way."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            name = getattr(record, "vllm_process_name", record.processName)
            message = {"level": record.levelno, "process": name, "text": self.format(record)[:LONGEST]}
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
                out.settimeout(SEND_SECONDS)
                out.sendto(json.dumps(message).encode(), os.environ[SOCKET_VARIABLE])
        except (KeyError, OSError):  # the owner is gone, or its engine is: nobody keeps a log of this any more
            return
        except Exception:
            self.handleError(record)


def forward_own() -> None:
    """In a process of the engine: let this project's records take the same way as vLLM's."""
    if not any(isinstance(handler, Forwarder) for handler in logger.handlers):
        logger.addHandler(Forwarder())


class Receiver:
    """Logs what the processes of one engine send, in the context (and so the flow run) of whoever made it."""

    def __init__(self) -> None:
        """Set the environment for the engine's processes, which must start after this."""
        self._lock, self._closed = threading.Lock(), False
        self._directory = tempfile.TemporaryDirectory(prefix="layertap-log-")
        self._address = str(Path(self._directory.name) / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        os.environ[SOCKET_VARIABLE] = self._address
        self._config = Path(self._directory.name) / "logging.json"
        self._config.write_text(json.dumps(_config(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())))
        if os.environ.setdefault(CONFIG_VARIABLE, str(self._config)) == str(self._config):  # a user's own file stays
            _keep_other_handlers()
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="layertap-engine-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while message := self._socket.recv(8 * LONGEST):
            # Whatever a handler raises: where the worker that read this process's output was killed, rich ends the
            # thread that writes to the broken pipe. Unread, the socket would fill up and stop who writes to it.
            with suppress(Exception, SystemExit):
                record = json.loads(message)
                engine_logger.log(int(record["level"]), "%s: %s", record["process"], record["text"])

    def close(self) -> None:
        """Log what has arrived, and stop. Safe to call twice."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._close()

    def _close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
            out.sendto(b"", self._address)
        self._thread.join()
        self._socket.close()
        if os.environ.get(CONFIG_VARIABLE) == str(self._config):
            del os.environ[CONFIG_VARIABLE]
        if os.environ.get(SOCKET_VARIABLE) == self._address:
            del os.environ[SOCKET_VARIABLE]
        self._directory.cleanup()


def _keep_other_handlers() -> None:
    """Let vLLM, in this process, touch no handlers but its own when it reads the file.

    Python's way of reading it first flushes every handler of the process, while it holds a lock that logging needs.
    Prefect's handler then waits for a thread that may be about to log: the run would stand still for ever.
    """
    as_python_does = logging.config.dictConfig

    def configure(config: Any) -> None:
        if set(config.get("handlers", ())) != {"layertap"}:
            as_python_does(config)  # a user's own file, or none
            return
        of_vllm = logging.getLogger("vllm")
        of_vllm.handlers = [Forwarder()]
        of_vllm.setLevel(config["loggers"]["vllm"]["level"])
        of_vllm.propagate = False

    logging.config.dictConfig = configure
    try:
        import vllm.logger
    finally:
        logging.config.dictConfig = as_python_does
    vllm.logger.dictConfig = configure


def _config(level: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"layertap": {"class": f"{__name__}.{Forwarder.__name__}"}},
        "loggers": {"vllm": {"handlers": ["layertap"], "level": level, "propagate": False}},
    }
