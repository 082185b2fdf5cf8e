"""Reading an object store from a forked process.

obstore's threads do not survive a fork: its first call in the child would wait for ever. A process that was forked
(a DataLoader worker, say) therefore reads through a small program of its own, started here, that uses obstore.

Protocol: a request is a line of JSON, ``{"paths": [...]}`` or ``{"names": directory}``. Each answer is a length as a
little-endian int64 and that many bytes; length -1 means that there is no such object, and -2 that a message about a
failure follows as an answer of its own, which ends the reply.
"""

import json
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import IO

import google_crc32c

from tasks.store.errors import StorageFailure

_LENGTH = struct.Struct("<q")
_MISSING, _FAILED = -1, -2
_WINDOW = 16


class Relay:
    """The reading half of a backend, answered by a helper process that ends with this one."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._helper = subprocess.Popen(
            [sys.executable, "-m", "tasks.store.relay", url], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def __del__(self) -> None:
        helper = getattr(self, "_helper", None)
        if helper is not None:
            for pipe in (helper.stdin, helper.stdout):
                with suppress(OSError):
                    pipe.close()
            helper.wait()

    def read(self, path: str) -> bytes:
        (data,) = self.read_all([path])
        if data is None:
            raise FileNotFoundError(path)
        return data

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes | None]:
        # A window's answers are all taken before the first is handed on: a reader that stops early leaves none behind.
        for start in range(0, len(paths), _WINDOW):
            window = list(paths[start : start + _WINDOW])
            self._ask({"paths": window})
            yield from [self._answer() for _ in window]

    def read_summed(self, paths: Sequence[str]) -> Iterator[tuple[memoryview, int] | None]:
        for data in self.read_all(paths):
            yield None if data is None else (memoryview(data), google_crc32c.value(data))

    def names(self, directory: str) -> list[str]:
        self._ask({"names": directory})
        return list(json.loads(self._answer() or b"[]"))

    def _ask(self, request: object) -> None:
        assert self._helper.stdin is not None
        try:
            self._helper.stdin.write(json.dumps(request).encode() + b"\n")
            self._helper.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def _answer(self) -> bytes | None:
        assert self._helper.stdout is not None
        header = self._helper.stdout.read(_LENGTH.size)
        if len(header) < _LENGTH.size:
            raise self._ended()
        (length,) = _LENGTH.unpack(header)
        if length == _MISSING:
            return None
        if length == _FAILED:
            raise StorageFailure((self._answer() or b"").decode())
        return self._helper.stdout.read(length)

    def _ended(self) -> StorageFailure:
        return StorageFailure(f"the process that reads {self.url} ended with status {self._helper.wait()}")


def serve(url: str, requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer requests until there are no more."""
    from tasks.store.object_store import ObjectBackend

    backend = None
    for line in requests:
        request = json.loads(line)
        try:
            backend = backend or ObjectBackend(url)
            if "names" in request:
                _send(answers, json.dumps(backend.names(request["names"])).encode())
            else:
                for data in backend.read_all(request["paths"]):
                    _send(answers, data)
        except Exception as error:
            answers.write(_LENGTH.pack(_FAILED))
            _send(answers, str(error).encode())
        answers.flush()


def _send(answers: IO[bytes], data: bytes | None) -> None:
    answers.write(_LENGTH.pack(_MISSING if data is None else len(data)))
    answers.write(data or b"")


if __name__ == "__main__":
    serve(sys.argv[1], sys.stdin.buffer, sys.stdout.buffer)
