"""Records of the engine's processes arrive in the owner's log."""

import logging
import os
import subprocess
import sys

import pytest

from tasks.extract.logs import CONFIG_VARIABLE, SOCKET_VARIABLE, Forwarder, Receiver

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
    first, second, third = messages(caplog)
    assert first == "MainProcess: from the child"
    assert second.startswith("MainProcess: it failed\nTraceback")
    assert "ZeroDivisionError" in second
    assert 10_000 < len(third) < 20_000, "a record of any size is cut, not lost"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR, logging.ERROR]


class Flushed(logging.Handler):
    """Notes that it was flushed, as Prefect's handler is by whoever configures logging anew."""

    times = 0

    def flush(self) -> None:
        self.times += 1


def test_vllm_leaves_the_handlers_of_this_process_alone() -> None:
    handler = Flushed()
    receiver = Receiver()
    try:
        import vllm.logger

        vllm.logger._configure_vllm_root_logger()
        assert handler.times == 0
        assert [type(each) for each in logging.getLogger("vllm").handlers] == [Forwarder]
    finally:
        receiver.close()


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
