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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

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


class _Beside(logging.config.DictConfigurator):
    """Sets up what a configuration names, and leaves all other handlers and loggers of the process alone."""

    def configure(self) -> None:
        makers = {
            "formatters": self.configure_formatter,
            "filters": self.configure_filter,
            "handlers": self.configure_handler,
        }
        for kind, make in makers.items():
            for name, values in self.config.get(kind, {}).items():
                self.config[kind][name] = make(values)
        for name, values in self.config.get("loggers", {}).items():
            self.configure_logger(name, values)
        if "root" in self.config:
            self.configure_root(self.config["root"])


@contextmanager
def others_kept() -> Iterator[None]:
    """Within, a configuration of logging, such as vLLM's in the process that owns the engine, adds to what is there.

    Python would flush and close all handlers of the process first, and hold logging's own lock meanwhile. Prefect's
    handlers then wait for a thread that may wait for that lock, as it does to send a heartbeat: a run was seen to hang
    like this for ever.
    """
    before = logging.config.dictConfigClass
    logging.config.dictConfigClass = _Beside
    try:
        yield
    finally:
        logging.config.dictConfigClass = before


class Receiver:
    """Logs what the processes of one engine send, in the context (and so the flow run) of whoever made it."""

    def __init__(self) -> None:
        """Set the environment for the engine's processes, which must start after this."""
        self.failure: str | None = None
        """What the first traceback that was logged ends with; known once closed."""
        self._lock, self._closed = threading.Lock(), False
        self._directory = tempfile.TemporaryDirectory(prefix="layertap-log-")
        self._address = str(Path(self._directory.name) / "socket")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._address)
        os.environ[SOCKET_VARIABLE] = self._address
        self._config = Path(self._directory.name) / "logging.json"
        self._config.write_text(json.dumps(_config(os.environ.get(LEVEL_VARIABLE, "WARNING").upper())))
        os.environ.setdefault(CONFIG_VARIABLE, str(self._config))  # a user's own file stays
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="layertap-engine-log", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while message := self._socket.recv(8 * LONGEST):
            # Whatever a handler raises: where the worker that read this process's output was killed, rich ends the
            # thread that writes to the broken pipe. Unread, the socket would fill up and stop who writes to it.
            with suppress(Exception, SystemExit):
                record = json.loads(message)
                if self.failure is None and record["level"] >= logging.ERROR and "Traceback" in record["text"]:
                    self.failure = record["text"].rstrip().rpartition("\n")[2]
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


def _config(level: str) -> dict[str, object]:
    return {
        "version": 1,
        "disable_existing_loggers": False,
        "handlers": {"layertap": {"class": f"{__name__}.{Forwarder.__name__}"}},
        "loggers": {"vllm": {"handlers": ["layertap"], "level": level, "propagate": False}},
    }
