"""Records of the engine's processes arrive in the owner's log."""

import json
import logging
import logging.config
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.extract.logs import CONFIG_VARIABLE, SOCKET_VARIABLE, Forwarder, Receiver, others_kept

# As vLLM does it in each of its processes.
CHILD = f"""
import json, logging, logging.config, os
logging.config.dictConfig(json.load(open(os.environ["{CONFIG_VARIABLE}"])))
logger = logging.getLogger("vllm.worker")
logger.info("too low a level")
logger.warning("from %s", "the child")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("it failed")
logger.error("x" * 100_000)
"""


def messages(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "layertap.engine"]


def test_records_of_another_process_arrive(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    receiver = Receiver()
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    receiver.close()
    assert receiver.failure == "ZeroDivisionError: division by zero"
    first, second, third = messages(caplog)
    assert first == "MainProcess: from the child"
    assert second.startswith("MainProcess: it failed\nTraceback")
    assert "ZeroDivisionError" in second
    assert 10_000 < len(third) < 20_000, "a record of any size is cut, not lost"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR, logging.ERROR]


def test_the_owner_s_own_handlers_are_neither_flushed_nor_closed(caplog: pytest.LogCaptureFixture) -> None:
    called = []

    class Handler(logging.NullHandler):
        def flush(self) -> None:
            called.append("flush")  # under the lock of logging, for which whoever is to be flushed may wait

        def close(self) -> None:
            called.append("close")

    _handler = Handler()
    receiver = Receiver()
    try:
        with others_kept():
            logging.config.dictConfig(json.loads(Path(os.environ[CONFIG_VARIABLE]).read_text()))
        logging.getLogger("vllm.core").error("from here")
        assert [type(each) for each in logging.getLogger("vllm").handlers] == [Forwarder]
    finally:
        receiver.close()
        logging.getLogger("vllm").handlers.clear()
    assert messages(caplog) == ["MainProcess: from here"]
    assert not called


def test_a_user_s_own_configuration_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONFIG_VARIABLE, "/etc/mine.json")
    Receiver().close()
    assert os.environ[CONFIG_VARIABLE] == "/etc/mine.json"


def test_nothing_is_left_in_the_environment() -> None:
    Receiver().close()
    assert SOCKET_VARIABLE not in os.environ
    assert CONFIG_VARIABLE not in os.environ


@pytest.mark.parametrize("address", [None, "/nowhere/socket"])
def test_without_a_receiver_a_record_is_dropped(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SOCKET_VARIABLE, raising=False)
    if address is not None:
        monkeypatch.setenv(SOCKET_VARIABLE, address)
    Forwarder().emit(logging.makeLogRecord({"msg": "nobody hears this"}))
