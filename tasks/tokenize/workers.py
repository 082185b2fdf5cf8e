"""Processes that turn batches of rows into samples.

They are plain children that read pickles from their standard input, not :mod:`multiprocessing`'s: these would import
the program's main module once more each (a flow engine, a script without a ``__main__`` guard).
"""

import os
import pickle
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from tasks.tokenize.errors import TokenizeError

Task = TypeVar("Task")
Result = TypeVar("Result")

START = (
    "import pickle, sys; sys.path[:] = pickle.load(sys.stdin.buffer); from tasks.tokenize.workers import serve; serve()"
)


class Worker(Generic[Task, Result]):
    """A child process that applies one function; it ends when its input does, so also when this process dies."""

    def __init__(self, make: Callable[[], Callable[[Task], Result]]) -> None:
        """``make``: called in the child at its first task, gives the function; both must be picklable."""
        environment = os.environ | {"TOKENIZERS_PARALLELISM": "false"}  # one thread in each process
        self._process = subprocess.Popen(
            [sys.executable, "-c", START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # an interrupt at the terminal is this process's to handle
        )
        self._send(sys.path)
        self._send(make)

    def __call__(self, task: Task) -> Result:
        """The function's result.

        Raises:
            TokenizeError: the process died.
            Exception: what the function raised.
        """
        assert self._process.stdout is not None
        try:
            self._send(task)
            result, error = pickle.load(self._process.stdout)
        except (EOFError, OSError, pickle.UnpicklingError):
            code = self._process.wait()
            raise TokenizeError(
                f"a tokenizing process died with exit code {code}; if it ran out of memory, lower `data.processes`"
            ) from None
        if error is not None:
            raise error
        return result  # type: ignore[no-any-return]

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        pickle.dump(value, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def close(self) -> None:
        """Stop the process at once, whatever it does."""
        self._process.kill()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            with suppress(BrokenPipeError):
                stream.close()
        self._process.wait()


def map_in_processes(
    make: Callable[[], Callable[[Task], Result]], tasks: Iterator[Task], processes: int
) -> Generator[Result, None, None]:
    """Results in the order of the tasks, with a bounded number of tasks under way.

    Raises:
        TokenizeError: a process died.
        Exception: what the function raised.
    """
    workers = [Worker[Task, Result](make) for _ in range(processes)]
    idle: SimpleQueue[Worker[Task, Result]] = SimpleQueue()
    for worker in workers:
        idle.put(worker)

    def run(task: Task) -> Result:
        worker = idle.get()
        try:
            return worker(task)
        finally:
            idle.put(worker)

    under_way: deque[Future[Result]] = deque()
    threads = ThreadPoolExecutor(processes, thread_name_prefix="tokenize")
    try:
        for task in tasks:
            under_way.append(threads.submit(run, task))
            if len(under_way) >= 2 * processes + 2:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        for worker in workers:
            worker.close()
        threads.shutdown()


def serve() -> None:
    """The child's side."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a checkpoint's code prints must not get between the answers
    make = pickle.load(sys.stdin.buffer)
    function = None
    while True:
        try:
            task = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        answer: tuple[Any, Exception | None]
        try:
            function = function or make()
            answer = function(task), None
        except Exception as e:
            answer = None, e
        pickle.dump(answer, answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()
