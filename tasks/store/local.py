"""A store in a local directory, and staging directories with their owners' locks."""

import ctypes
import fcntl
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from tasks.store.backend import Expected, Lease, Publication, busy, owner
from tasks.store.errors import StorageFailure, storage_failures
from tasks.store.layout import PRIVATE, RECORD, sample_path


class FileLock:
    """An exclusive lock on a file that ends with its process, however that ends."""

    def __init__(self, path: Path, run: str) -> None:
        """Take the lock and write who holds it; BlockingIOError where a live process does."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner(run)).encode(), 0)
        except BlockingIOError:
            self.release()
            raise
        except OSError as error:
            self.release()
            raise StorageFailure(
                f"cannot lock {path}: {error.strerror}; the store needs a file system with file locks and room"
            ) from error

    def check(self) -> None:
        """Nothing to do: the operating system keeps the lock."""

    def release(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class StagingArea:
    """Staging directories under one parent. Each is held by a lock, so that those of dead runs can be told."""

    _OWNER = "owner.json"

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._locks: dict[Path, FileLock] = {}

    def create(self, run: str) -> Path:
        directory = self._parent / f"{run}-{uuid.uuid4().hex[:8]}"
        with storage_failures(directory):
            directory.mkdir(parents=True)
            self._locks[directory] = FileLock(directory / self._OWNER, run)
        return directory

    def drop(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)
        self._locks.pop(directory).release()

    def collect(self) -> int:
        """Remove the directories whose owners are dead."""
        removed = 0
        for directory in sorted(self._parent.iterdir()) if self._parent.is_dir() else []:
            try:
                lock = FileLock(directory / self._OWNER, "collector")
            except BlockingIOError:
                continue
            except FileNotFoundError:  # another collector was faster
                continue
            shutil.rmtree(directory, ignore_errors=True)
            lock.release()
            removed += 1
        return removed


class LocalBackend:
    """A store in a local directory."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)
        self._private = self.root / PRIVATE
        self._staging = StagingArea(self._private / "staging")

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes | None]:
        for path in paths:
            try:
                yield self.read(path)
            except (FileNotFoundError, NotADirectoryError):
                yield None

    def put(self, path: str, data: bytes) -> None:
        target = self.root / path
        temporary = self._private / "tmp" / uuid.uuid4().hex
        with storage_failures(target):
            temporary.parent.mkdir(parents=True, exist_ok=True)
            target.parent.mkdir(parents=True, exist_ok=True)
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
            return sorted(path.name for path in (self.root / directory).iterdir())
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
            for key, files, sizes in expected:
                directory = f"{key[:2]}/{key}/"
                try:
                    for file, size in zip(files, sizes, strict=True):
                        if stat(directory + file, dir_fd=samples).st_size != size:
                            yield key
                            break
                except OSError:
                    yield key
        finally:
            os.close(samples)

    def sizes(self, path: str) -> dict[str, int]:
        top = self.root / path
        return {
            str((Path(parent) / name).relative_to(top)): (Path(parent) / name).stat().st_size
            for parent, _, names in os.walk(top)
            for name in names
        }

    def staging(self, run: str) -> Path:
        return self._staging.create(run)

    def drop_staging(self, directory: Path) -> None:
        self._staging.drop(directory)

    def collect_staging(self) -> int:
        # Only the run that holds the lease writes here, so what lies in tmp belongs to a dead one.
        shutil.rmtree(self._private / "tmp", ignore_errors=True)
        return self._staging.collect()

    def publish(self, samples: Sequence[Publication]) -> list[bool]:
        published = []
        shards = set()
        with storage_failures(self.root):
            for sample in samples:
                (sample.directory / RECORD).write_bytes(sample.record)
            # One barrier for all files of all samples: everything is on the disk before anything is visible.
            _sync_file_system(self._private)
            for sample in samples:
                target = self.root / sample_path(sample.key)
                try:
                    sample.directory.rename(target)
                except OSError:  # a directory that is not empty is never replaced
                    if not (target / RECORD).exists():
                        raise
                    shutil.rmtree(sample.directory)
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


def _sync_file_system(path: Path) -> None:
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


def _load(path: Path) -> dict[str, object]:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
