"""What the store asks of the place it is kept in, and the answer of a local file system.

A path is relative to the store, with forward slashes. :mod:`tasks.store.object_store` is the other answer.
"""

import ctypes
import fcntl
import json
import os
import shutil
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tasks.store.errors import StorageFailure, StoreBusy, storage_failures
from tasks.store.layout import PRIVATE, RECORD, object_paths, sample_path

Expected = tuple[str, int, Sequence[int]]
"""A committed sample as the manifest has it: key, tokens, and bytes of its files in the order of the layout."""


class Lease(Protocol):
    """The right to write to a store, held by one run at a time."""

    def check(self) -> None:
        """Raise :class:`StoreBusy` if another run has taken the store over."""

    def release(self) -> None: ...


class Backend(Protocol):
    """Files of one store."""

    url: str

    def read(self, path: str) -> bytes:
        """Content of a file; FileNotFoundError where there is none."""

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a file, atomically and durably."""

    def names(self, directory: str) -> list[str]:
        """Names directly in a directory, sorted; empty where there is none."""

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all in it, if it is there."""

    def incomplete(self, expected: Iterable[Expected]) -> Iterator[str]:
        """Keys of which a file is missing or has another size."""

    def sizes(self, key: str) -> dict[str, int]:
        """Bytes of each file of a sample, by path relative to the sample."""

    def staging(self, run: str) -> Path:
        """A local directory for a run's staged samples, with the owner's liveness recorded."""

    def drop_staging(self, directory: Path) -> None:
        """Remove a staging directory of this process."""

    def collect_staging(self) -> int:
        """Remove staging directories whose owners are dead; returns their number."""

    def publish(self, staged: Sequence[tuple[Path, str, bytes]]) -> list[bool]:
        """Commit samples, each a staged directory, its key and its completion record.

        Returns for each whether it was committed; False where the key has a completion record already.
        """

    def set_aside(self, key: str) -> None:
        """Take a damaged sample out of the way."""

    def lease(self, run: str) -> Lease:
        """Take the right to write; StoreBusy where a live run holds it."""

    def free_bytes(self) -> int | None:
        """Room left, where the place has such a limit."""


def open_backend(url: str | os.PathLike[str]) -> Backend:
    """Backend for a path, a ``file://`` URL, or any URL that obstore knows (``s3://bucket/prefix``)."""
    text = os.fspath(url)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return LocalBackend(Path(url2pathname(parts.path)))
    if "://" in text:
        from tasks.store.object_store import ObjectBackend

        return ObjectBackend(text)
    return LocalBackend(Path(text).expanduser())


def owner(run: str) -> dict[str, object]:
    """Who holds something, for people to read."""
    return {"run": run, "host": socket.gethostname(), "pid": os.getpid()}


class FileLock:
    """An exclusive lock that ends with its process, however that ends."""

    def __init__(self, path: Path, run: str) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._descriptor)
            if isinstance(error, BlockingIOError):
                raise
            raise StorageFailure(
                f"cannot lock {path}: {error.strerror}; put the store on a file system that supports file locks"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(owner(run)).encode(), 0)

    def check(self) -> None:
        """Nothing to do: the operating system keeps the lock."""

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def collect_staging(parent: Path) -> int:
    """Remove the staging directories under ``parent`` whose owner's lock is free."""
    removed = 0
    for directory in sorted(parent.iterdir()) if parent.is_dir() else []:
        try:
            lock = FileLock(directory / "owner.json", "gc")
        except BlockingIOError:
            continue
        except (FileNotFoundError, NotADirectoryError):
            lock = None
        shutil.rmtree(directory, ignore_errors=True)
        if lock is not None:
            lock.release()
        removed += 1
    return removed


def _syncfs(path: Path) -> None:
    """Flush everything written to the file system that holds ``path``, one barrier for many files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:  # not Linux
            os.sync()
        elif syncfs(descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), str(path))
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class LocalBackend:
    """A store in a local directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        self._private = self.root / PRIVATE
        self._staging_locks: dict[Path, FileLock] = {}

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def put(self, path: str, data: bytes) -> None:
        target = self.root / path
        with storage_failures(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}.tmp")
            try:
                with temporary.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(target)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync_directory(target.parent)

    def names(self, directory: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.root / directory) if not name.endswith(".tmp"))  # noqa: PTH208
        except (FileNotFoundError, NotADirectoryError):
            return []

    def remove(self, path: str) -> None:
        target = self.root / path
        with storage_failures(target):
            if target.is_dir():
                shutil.rmtree(target)
            else:
                target.unlink(missing_ok=True)

    def incomplete(self, expected: Iterable[Expected]) -> Iterator[str]:
        stat = os.stat
        try:
            samples = os.open(self.root / "samples", os.O_RDONLY)
        except FileNotFoundError:
            yield from (key for key, _, _ in expected)
            return
        try:
            for key, num_tokens, sizes in expected:
                directory = f"{key[:2]}/{key}/"
                try:
                    for path, size in zip((*object_paths(num_tokens), RECORD), sizes, strict=True):
                        if stat(directory + path, dir_fd=samples).st_size != size:
                            yield key
                            break
                except OSError:
                    yield key
        finally:
            os.close(samples)

    def sizes(self, key: str) -> dict[str, int]:
        directory = self.root / sample_path(key)
        return {
            str((Path(parent) / name).relative_to(directory)): (Path(parent) / name).stat().st_size
            for parent, _, names in os.walk(directory)
            for name in names
        }

    def staging(self, run: str) -> Path:
        directory = self._private / "staging" / f"{run}-{uuid.uuid4().hex[:8]}"
        with storage_failures(directory):
            directory.mkdir(parents=True)
            self._staging_locks[directory] = FileLock(directory / "owner.json", run)
        return directory

    def drop_staging(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._staging_locks.pop(directory).release()

    def collect_staging(self) -> int:
        with storage_failures(self._private):
            return collect_staging(self._private / "staging")

    def publish(self, staged: Sequence[tuple[Path, str, bytes]]) -> list[bool]:
        published = []
        with storage_failures(self.root):
            for directory, _, record in staged:
                (directory / RECORD).write_bytes(record)
            _syncfs(self._private)
            shards = set()
            for directory, key, _ in staged:
                target = self.root / sample_path(key)
                try:
                    directory.rename(target)
                except OSError:
                    if not (target / RECORD).exists():
                        raise
                    shutil.rmtree(directory)
                    published.append(False)
                else:
                    shards.add(target.parent)
                    published.append(True)
            for shard in shards:
                _sync_directory(shard)
        return published

    def set_aside(self, key: str) -> None:
        source = self.root / sample_path(key)
        target = self._private / "damaged" / f"{key}-{uuid.uuid4().hex[:8]}"
        with storage_failures(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                source.rename(target)
            except FileNotFoundError:
                return
            _sync_directory(source.parent)

    def lease(self, run: str) -> Lease:
        path = self._private / "writer.json"
        with storage_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                return FileLock(path, run)
            except BlockingIOError:
                raise busy(self.url, _load(path)) from None

    def free_bytes(self) -> int | None:
        existing = self.root
        while not existing.exists():
            existing = existing.parent
        return shutil.disk_usage(existing).free


def busy(url: str, holder: Mapping[str, object]) -> StoreBusy:
    """The error for a store that another run is writing to."""
    return StoreBusy(
        f"{url} is being written by run {holder.get('run')} (host {holder.get('host')}, process {holder.get('pid')}); "
        "one run writes to a store at a time: wait for it to end, or choose another store"
    )


def _load(path: Path) -> dict[str, object]:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
