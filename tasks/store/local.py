"""A store in a local directory, and staging directories with their owners' locks."""

import ctypes
import fcntl
import json
import os
import shutil
import uuid
import weakref
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import google_crc32c

from tasks.store.backend import Expected, Lease, Publication, Share, busy, owner
from tasks.store.buffers import scratch
from tasks.store.errors import StorageFailure, storage_failures
from tasks.store.layout import PRIVATE, RECORD, sample_path
from tasks.store.links import Links, links_in

_READ_STEP = 1 << 18


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


class SharedLock:
    """A group's lock on a file, which any number of its members hold and nobody else, and one member's own lock."""

    def __init__(self, path: Path, own: Path, run: str, share: Share) -> None:
        """Take both locks; BlockingIOError where another run, another group, or another holder of the share lives."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            self._join(path, run, share)
            own.parent.mkdir(exist_ok=True)
            self._own = FileLock(own, run)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _join(self, path: Path, run: str, share: Share) -> None:
        try:
            # Alone with the file, this is the first of the group: it writes whose the file is and lets others in.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(owner(run, share)).encode(), 0)
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if _load(path).get("group") != share.group:
            raise BlockingIOError

    def check(self) -> None:
        """Nothing to do: the operating system keeps the locks."""

    def release(self) -> None:
        self._own.release()
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
        while True:
            directory = self._parent / f"{run}-{uuid.uuid4().hex[:8]}"
            with storage_failures(directory):
                directory.mkdir(parents=True)
                try:
                    self._locks[directory] = FileLock(directory / self._OWNER, run)
                except (BlockingIOError, FileNotFoundError):  # a collector took it for a dead run's
                    continue
            return directory

    def drop(self, directory: Path) -> None:
        lock = self._locks.pop(directory)
        try:
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            lock.release()

    def free_bytes(self) -> int:
        existing = self._parent
        while not existing.exists():
            existing = existing.parent
        return shutil.disk_usage(existing).free

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
        self.links: Links | None = links_in(str(self._private / "links"))
        self._staging = StagingArea(self._private / "staging")
        self._descriptor: int | None = None

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes | None]:
        for path in paths:
            try:
                yield self.read(path)
            except (FileNotFoundError, NotADirectoryError):
                yield None

    def read_summed(self, paths: Sequence[str]) -> Iterator[tuple[memoryview, int] | None]:
        for path in paths:
            try:
                descriptor = os.open(self.root / path, os.O_RDONLY)
            except (FileNotFoundError, NotADirectoryError):
                yield None
                continue
            try:
                size = os.fstat(descriptor).st_size
                buffer, crc, filled = scratch("file", size), 0, 0
                # In steps that stay in the processor's cache from the read to the checksum.
                while filled < size:
                    step = buffer[filled : filled + _READ_STEP]
                    if not (count := os.readv(descriptor, [step.data])):
                        break
                    crc = google_crc32c.extend(crc, step[:count])
                    filled += count
            finally:
                os.close(descriptor)
            yield buffer.data[:filled], crc

    def put(self, path: str, data: bytes) -> None:
        self.put_all({path: data})

    def put_all(self, documents: Mapping[str, bytes]) -> None:
        directory = self._private / "tmp" / uuid.uuid4().hex
        with storage_failures(self.root):
            directory.mkdir(parents=True)
            try:
                for number, data in enumerate(documents.values()):
                    (directory / str(number)).write_bytes(data)
                self._barrier()
                for number, path in enumerate(documents):
                    target = self.root / path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (directory / str(number)).replace(target)
                self._barrier()
            finally:
                shutil.rmtree(directory, ignore_errors=True)

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

    def shared_file(self, path: str) -> Hashable | None:
        try:
            status = os.stat(f"{self.root}/{path}")  # noqa: PTH116
        except (FileNotFoundError, NotADirectoryError):
            return None
        return (status.st_dev, status.st_ino) if status.st_nlink > 1 else None

    def shared_bytes(self, expected: Iterable[Expected]) -> int:
        if self.links is None or all(status.st_nlink <= 2 for _, status in self.links.entries()):
            return 0
        counted: set[int] = set()
        shared = 0
        for key, files, sizes in expected:
            for file, size in zip(files, sizes, strict=True):
                try:
                    status = os.stat(f"{self.root}/{sample_path(key)}/{file}")  # noqa: PTH116
                except FileNotFoundError:
                    continue
                if status.st_nlink > 1 and status.st_ino in counted:
                    shared += size
                counted.add(status.st_ino)
        return shared

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

    def collect_staging(self, *, alone: bool = True) -> int:
        if alone:  # what lies in tmp belongs to a dead run
            shutil.rmtree(self._private / "tmp", ignore_errors=True)
        return self._staging.collect()

    def publish(self, samples: Sequence[Publication]) -> list[bool]:
        published = []
        with storage_failures(self.root):
            for sample in samples:
                (sample.directory / RECORD).write_bytes(sample.record)
            # One barrier for all files of all samples: everything is on the disk before anything is visible. The
            # renames reach the disk with the next barrier, that of the manifest at the latest.
            self._barrier()
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
                    published.append(True)
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
            self._barrier()

    def lease(self, run: str, share: Share | None = None) -> Lease:
        path = self._private / "writer.json"
        own = self._private / "shares" / f"{share.name}.json" if share else path
        with storage_failures(path):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except (FileExistsError, NotADirectoryError):
                raise StorageFailure(
                    f"{self.root} is a file or below one; a store is a directory: name a new or an empty one",
                    lasting=True,
                ) from None
            except FileNotFoundError as error:  # as the kernel's own file systems say it
                raise StorageFailure(
                    f"no directory can be made at {self.root}: {error.strerror}; choose another place for the store",
                    lasting=True,
                ) from None
            if self._descriptor is None:
                self._descriptor = os.open(self._private, os.O_RDONLY)
                weakref.finalize(self, os.close, self._descriptor)
            try:
                return SharedLock(path, own, run, share) if share else FileLock(path, run)
            except BlockingIOError:
                holder = _load(path)
                mine = share is not None and holder.get("group") == share.group
                raise busy(self.url, _load(own) if mine else holder) from None

    def _barrier(self) -> None:
        """Bring everything written so far to the disk: files, and the directories that name them.

        One barrier for many files costs little more than fsync of a single one. It goes through a descriptor that
        was opened before any of them was written, since the kernel reports to each only later failures to write.
        """
        assert self._descriptor is not None, "only a run that holds the lease writes"
        syncfs = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
        if syncfs is None:  # not Linux
            os.sync()
        elif syncfs(self._descriptor) != 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), self.url)

    def free_bytes(self) -> int | None:
        return self._staging.free_bytes()

    def staging_free_bytes(self) -> int:
        return self._staging.free_bytes()


def _load(path: Path) -> dict[str, object]:
    try:
        loaded = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return loaded if isinstance(loaded, dict) else {}
