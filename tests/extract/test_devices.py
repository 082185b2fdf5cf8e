"""One engine at a time on each device; whoever comes second waits and says for whom."""

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tasks.extract import devices
from tasks.extract.devices import NODE_VARIABLE, Devices, engine_devices


@pytest.fixture(autouse=True)
def _own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(devices.tempfile, "tempdir", None)
    monkeypatch.setattr(devices, "POLL_S", 0.01)
    monkeypatch.delenv(NODE_VARIABLE, raising=False)


def taken(owner: str, names: list[str]) -> Devices:
    held = Devices(owner)
    assert held.take(names, threading.Event())
    return held


def refused(names: list[str]) -> bool:
    """Whether somebody has one of the devices: a wait that is given up at once."""
    stop = threading.Event()
    stop.set()
    other = Devices("other")
    got = other.take(names, stop)
    other.release()
    return not got


def test_the_second_waits_and_says_for_whom(caplog: pytest.LogCaptureFixture) -> None:
    first, second = taken("brave-otter", ["gpu-0", "gpu-1"]), Devices("calm-heron")
    done = threading.Event()

    def wait() -> None:
        assert second.take(["gpu-1", "gpu-2"], threading.Event())
        done.set()

    with caplog.at_level(logging.WARNING, logger="layertap"):
        thread = threading.Thread(target=wait)
        thread.start()
        while not caplog.messages:
            assert not done.wait(0.01)
        first.release()
        thread.join()
    assert len(caplog.messages) == 1
    assert f"gpu-1 is in use by the engine of brave-otter (process {os.getpid()}, since" in caplog.messages[0]
    assert not refused(["gpu-0"])
    assert refused(["gpu-2"])
    second.release()


def test_engines_on_other_devices_do_not_wait() -> None:
    held = taken("first", ["gpu-0", "gpu-1"])
    assert not refused(["gpu-2", "gpu-3"])
    assert refused(["gpu-3", "gpu-1"])
    assert not refused(["gpu-3"]), "what was held while waiting is let go"
    held.release()


def test_nodes_that_share_a_machine_do_not_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    held = taken("first", ["cpu-0"])
    monkeypatch.setenv(NODE_VARIABLE, "node/../b")
    assert not refused(["cpu-0"])
    held.release()


def test_the_devices_of_a_killed_process_are_free() -> None:
    script = (
        "import os, threading; from tasks.extract.devices import Devices;"
        "Devices('dead').take(['gpu-0'], threading.Event()); print('taken', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"taken\n"
        assert refused(["gpu-0"])
        process.kill()
    assert not refused(["gpu-0"])


def test_the_locks_are_for_all_users(tmp_path: Path) -> None:
    taken("first", ["gpu-0"]).release()
    directory = tmp_path / "layertap-devices"
    assert directory.stat().st_mode & 0o7777 == 0o1777
    assert (directory / "gpu-0").stat().st_mode & 0o777 == 0o666


def test_a_lock_is_no_way_to_another_file(tmp_path: Path) -> None:
    (tmp_path / "layertap-devices").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "layertap-devices" / "gpu-0").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"):
        Devices("first").take(["gpu-0"], threading.Event())
    assert (tmp_path / "mine").read_text() == "mine"


def test_names_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_devices(2, None, on_cpu=False) == ["gpu-0", "gpu-1"]
    assert engine_devices(2, "4, 6,7", on_cpu=False) == ["gpu-4", "gpu-6"]
    assert engine_devices(1, "GPU-8a/..", on_cpu=False) == ["gpu-GPU-8a___"]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 1})
    assert engine_devices(1, None, on_cpu=True) == ["cpu-1", "cpu-3"]
