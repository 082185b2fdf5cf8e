"""Batches spread over processes: order, errors, and no process left behind."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.tokenize.errors import SourceError, TokenizeError
from tasks.tokenize.workers import map_in_processes


def make_square() -> Callable[[int], int]:
    print("what a checkpoint's code prints")
    return square


def square(value: int) -> int:
    if value == -1:
        raise SourceError("no such thing")
    if value == -2:
        os.kill(os.getpid(), signal.SIGKILL)
    if value % 5 == 0:
        time.sleep(0.01)  # the order of the answers is not the order of the results
    return value * value


def make_pid() -> Callable[[Path], int]:
    return write_pid


def write_pid(directory: Path) -> int:
    (directory / str(os.getpid())).touch()
    return os.getpid()


def test_results_come_in_the_order_of_the_tasks() -> None:
    assert list(map_in_processes(make_square, iter(range(60)), 2)) == [i * i for i in range(60)]


def test_tasks_are_drawn_as_results_are_taken() -> None:
    drawn = 0

    def tasks() -> Iterator[int]:
        nonlocal drawn
        while True:
            drawn += 1
            yield drawn

    results = map_in_processes(make_square, tasks(), 2)
    assert [next(results) for _ in range(20)] == [i * i for i in range(1, 21)]
    assert drawn <= 20 + 6
    results.close()


def test_an_error_arrives_as_it_was_raised() -> None:
    results = map_in_processes(make_square, iter([1, -1, 2]), 2)
    assert next(results) == 1
    with pytest.raises(SourceError, match="no such thing"):
        list(results)


def test_a_process_that_dies_is_an_error() -> None:
    with pytest.raises(TokenizeError, match="a tokenizing process died with exit code -9"):
        list(map_in_processes(make_square, iter([1, -2, 2]), 2))


def test_no_process_is_left_when_the_results_are_not_wanted_any_more(tmp_path: Path) -> None:
    results = map_in_processes(make_pid, iter([tmp_path] * 50), 2)
    next(results)
    next(results)
    results.close()
    pids = [int(p.name) for p in tmp_path.iterdir()]
    assert pids
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
