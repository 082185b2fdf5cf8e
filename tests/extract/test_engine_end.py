"""How jobs and callers learn that the engine has ended; with a vLLM that never gives an answer."""

import multiprocessing
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.extract import engine as module
from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineClosed, EngineDied, EngineSpec, Job
from tasks.processes import Process

FOREVER = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]


class Silent:
    """Takes requests and never finishes one, as vLLM's client does after its engine process was killed."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.engine_core = self
        self.ended = False

    def collective_rpc(self, method: str, args: Any = ()) -> list[Any]:
        return []

    def step(self) -> list[Any]:
        self.asked.set()
        threading.Event().wait()
        raise AssertionError("never")

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process in the place of a rank."""
    with subprocess.Popen(FOREVER, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def started(child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> tuple[CaptureEngine, Silent]:
    vllm = Silent()

    def load(self: CaptureEngine) -> Silent:
        self.ranks = [{"processes": [child.pid]}]
        return vllm

    def admit(self: CaptureEngine, vllm: Silent, job: Job, owner: dict[str, Job]) -> None:
        owner.update(dict.fromkeys(job.samples, job))

    monkeypatch.setattr(CaptureEngine, "_load", load)
    monkeypatch.setattr(CaptureEngine, "_admit", admit)
    monkeypatch.setattr(CaptureEngine, "_probe", lambda self, vllm: None)
    monkeypatch.setattr(module, "ABANDON_SECONDS", 0.3)
    spec = EngineSpec(None, (1,), "float32", Engine(max_num_batched_tokens=64), "", {})  # type: ignore[arg-type]
    return CaptureEngine(spec).start(), vllm


def a_job() -> Job:
    return Job(Path(), {"0" * 64: np.arange(3, dtype=np.int32)})


def test_jobs_fail_at_once_when_a_process_is_killed(
    started: tuple[CaptureEngine, Silent], child: subprocess.Popen[bytes]
) -> None:
    engine, vllm = started
    under_way = engine.submit(a_job())
    assert vllm.asked.wait(10)
    queued = engine.submit(a_job())
    child.kill()
    for future in (under_way, queued):
        assert isinstance(future.exception(timeout=10), EngineDied)
    assert not engine.alive
    assert isinstance(engine.submit(a_job()).exception(timeout=10), EngineDied)
    engine.shutdown()  # returns, though vLLM's thread never does


def test_a_shutdown_ends_the_processes_and_is_no_death(
    started: tuple[CaptureEngine, Silent], child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, _ = started
    waiting = Process(child.pid)
    monkeypatch.setattr(Silent, "shutdown", lambda self: child.kill())
    engine.shutdown()
    assert waiting.gone(10)
    assert isinstance(engine.submit(a_job()).exception(timeout=10), EngineClosed)


def test_a_process_is_not_mistaken_for_another(child: subprocess.Popen[bytes]) -> None:
    gone = threading.Event()
    process = Process(child.pid)
    assert not process.gone(0)
    process.when_gone(gone.set)
    process.kill()
    assert gone.wait(10)
    child.wait()
    process.kill()  # nothing is there to be ended any more, whoever may have its number
    with pytest.raises(ProcessLookupError):
        Process(child.pid)


def told_of_interrupts(answer: Any) -> None:
    """In a process of the engine: say whether interrupts are kept from it, and go on for ever."""
    answer.send(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    threading.Event().wait()


def test_a_shutdown_ends_an_engine_that_is_being_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """And until then, an interrupt at the terminal reaches none of its processes."""
    answer, theirs = multiprocessing.Pipe(duplex=False)
    spawn = multiprocessing.get_context("spawn")

    def load(self: CaptureEngine) -> Any:
        process = spawn.Process(target=told_of_interrupts, args=(theirs,))
        process.start()
        process.join()
        raise RuntimeError("its process ended")

    monkeypatch.setattr(CaptureEngine, "_load", load)
    spec = EngineSpec(None, (1,), "float32", Engine(max_num_batched_tokens=64), "", {})  # type: ignore[arg-type]
    engine = CaptureEngine(spec)

    def start() -> None:
        with pytest.raises(RuntimeError, match="its process ended"):
            engine.start()

    loading = threading.Thread(target=start)
    loading.start()
    assert answer.poll(60)
    assert answer.recv(), "interrupts are kept from it"
    engine.shutdown()
    loading.join(60)
    assert not loading.is_alive()
    assert not multiprocessing.active_children()
