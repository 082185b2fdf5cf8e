"""A store in S3, GCS, Azure or whatever else obstore reaches.

Samples are staged on a local disk and uploaded when they are committed: the data objects first, the group's
``zarr.json`` last and only if there is none (``If-None-Match: *``). Objects appear whole or not at all, so a run
that dies in between leaves data objects without a completion record, which no reader takes for a sample.

Credentials and the endpoint come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_ENDPOINT_URL``, ...).
"""

import contextlib
import hashlib
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import google_crc32c
import obstore
from obstore.exceptions import AlreadyExistsError, BaseError
from obstore.store import from_url

if TYPE_CHECKING:
    from obstore.store import RetryConfig

from tasks.store.backend import Expected, Publication, Share, busy, owner
from tasks.store.errors import StorageFailure, StoreBusy, StoreError
from tasks.store.layout import PRIVATE, RECORD, sample_path
from tasks.store.links import Links
from tasks.store.local import StagingArea

IMPORTED_IN = os.getpid()
"""The process whose threads serve obstore; a forked child of it must not use this module."""

#: What obstore knows of these is written to as well as read; a file:// URL is a local store.
_SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss", "https")
_PARALLEL = 16
_FEW = 4  # up to this many samples of a shard are looked up one by one; more, by listing the shard
# Up to this many samples are looked up file by file; listing seven objects a sample takes long beyond that, and
# objects are whole or not there at all, so then the samples' names are listed, three hundred times as fast.
_IN_FULL = 5000
_HEARTBEAT_S = 20.0
_STALE_S = 120.0
_RETRIES: "RetryConfig" = {
    "max_retries": 8,
    "retry_timeout": timedelta(minutes=3),
    "backoff": {"init_backoff": timedelta(milliseconds=200), "max_backoff": timedelta(seconds=15), "base": 2},
}

_T = TypeVar("_T")


def connect(url: str) -> Any:
    """An obstore store for a URL, configured from the environment alone."""
    if "@" in urlsplit(url).netloc:
        raise StoreError("credentials do not belong in the store's URL; set them in the environment")
    scheme = urlsplit(url).scheme
    if scheme not in _SCHEMES:
        raise StoreError(
            f"{url}: a store is a directory, or a URL that begins with one of {', '.join(f'{s}://' for s in _SCHEMES)}"
        )
    plain_http = os.environ.get("AWS_ENDPOINT_URL", "").startswith("http://")
    try:
        return from_url(url, client_options={"allow_http": plain_http}, retry_config=_RETRIES)
    except (BaseError, ValueError) as error:
        reason = str(error).split("\n", 1)[0]
        raise StoreError(f"{url} cannot be used: {reason}. Correct the URL, or what the environment says") from None


class ObjectBackend:
    """A store under a prefix of a bucket."""

    def __init__(self, url: str, staging_dir: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.links: Links | None = None
        self._store = connect(self.url)
        parent = staging_dir or Path(tempfile.gettempdir())
        place = hashlib.sha256(self.url.encode()).hexdigest()[:16]
        self._staging = StagingArea(parent / f"layertap-staging-{os.getuid()}" / place)
        self._pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="object-store")

    def _try(self, action: Callable[[], _T]) -> _T:
        try:
            return action()
        except (FileNotFoundError, AlreadyExistsError):
            raise
        except (BaseError, OSError) as error:
            reason = str(error).split("\n", 1)[0]
            raise StorageFailure(
                f"{self.url} refused or could not be reached: {reason}. Check the bucket, AWS_ENDPOINT_URL and the "
                "credentials in the environment; committed samples are kept"
            ) from error

    def read(self, path: str) -> bytes:
        return self._try(lambda: obstore.get(self._store, path).bytes().to_bytes())

    def _read_or_none(self, path: str) -> bytes | None:
        try:
            return self.read(path)
        except FileNotFoundError:
            return None

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes | None]:
        ahead: deque[Future[bytes | None]] = deque()
        remaining = iter(paths)
        for path in itertools.islice(remaining, _PARALLEL):
            ahead.append(self._pool.submit(self._read_or_none, path))
        while ahead:
            data = ahead.popleft().result()
            for path in itertools.islice(remaining, 1):
                ahead.append(self._pool.submit(self._read_or_none, path))
            yield data

    def read_summed(self, paths: Sequence[str]) -> Iterator[tuple[memoryview, int] | None]:
        for data in self.read_all(paths):
            yield None if data is None else (memoryview(data), google_crc32c.value(data))

    def put(self, path: str, data: bytes) -> None:
        self._try(lambda: obstore.put(self._store, path, data))

    def put_all(self, documents: Mapping[str, bytes]) -> None:
        for _ in self._pool.map(lambda item: self.put(*item), documents.items()):
            pass

    def create(self, path: str, data: bytes) -> bool:
        """Write an object if there is none; whether it was this call that did."""
        try:
            self._try(lambda: obstore.put(self._store, path, data, mode="create", use_multipart=False))
        except AlreadyExistsError:
            # A retry whose first answer was lost finds its own object.
            return self._read_or_none(path) == data
        except StorageFailure:
            if self._read_or_none(path) == data:
                return True
            raise
        return True

    def names(self, directory: str) -> list[str]:
        prefix = directory.rstrip("/") + "/" if directory else ""
        found = self._try(lambda: obstore.list_with_delimiter(self._store, prefix or None))
        paths = [*found["common_prefixes"], *(entry["path"] for entry in found["objects"])]
        # Servers over a file system list an emptied directory as an object of its own name.
        return sorted({path[len(prefix) :].rstrip("/") for path in paths if path.startswith(prefix)} - {""})

    def remove(self, path: str) -> None:
        below = [f"{path}/{name}" for name in self.sizes(path)]
        self._try(lambda: obstore.delete(self._store, [path, *below]))

    def incomplete(self, expected: Iterable[Expected]) -> Iterator[str]:
        shards: dict[str, list[Expected]] = defaultdict(list)
        for sample in expected:
            shards[sample[0][:2]].append(sample)
        in_full = sum(map(len, shards.values())) <= _IN_FULL
        look_up = self._incomplete_of_shard if in_full else self._absent_of_shard
        for keys in self._pool.map(look_up, shards.values()):
            yield from keys

    def _absent_of_shard(self, expected: list[Expected]) -> list[str]:
        present = set(self.names(f"samples/{expected[0][0][:2]}"))
        return [key for key, _, _ in expected if key not in present]

    def _incomplete_of_shard(self, expected: list[Expected]) -> list[str]:
        if len(expected) <= _FEW:
            present = {
                f"{key}/{name}": size for key, _, _ in expected for name, size in self.sizes(sample_path(key)).items()
            }
        else:
            present = self.sizes(f"samples/{expected[0][0][:2]}")
        return [
            key
            for key, files, sizes in expected
            if any(present.get(f"{key}/{file}") != size for file, size in zip(files, sizes, strict=True))
        ]

    def shared_file(self, path: str) -> Hashable | None:
        return None

    def shared_bytes(self, expected: Iterable[Expected]) -> int:
        return 0

    def sizes(self, path: str) -> dict[str, int]:
        prefix = path.rstrip("/") + "/"
        cut = len(prefix)

        def collect() -> dict[str, int]:
            return {
                entry["path"][cut:]: entry["size"]
                for batch in obstore.list(self._store, prefix, chunk_size=1000)
                for entry in batch
                if entry["path"].startswith(prefix)
            }

        return self._try(collect)

    def staging(self, run: str) -> Path:
        return self._staging.create(run)

    def drop_staging(self, directory: Path) -> None:
        self._staging.drop(directory)

    def collect_staging(self, *, alone: bool = True) -> int:
        return self._staging.collect()

    def publish(self, samples: Sequence[Publication]) -> list[bool]:
        uploads = [(sample, path, size, crc) for sample in samples for path, (size, crc) in sample.objects.items()]
        # The map raises the first failure; nothing has a completion record by then.
        for _ in self._pool.map(lambda upload: self._upload(*upload), uploads):
            pass
        published = list(
            self._pool.map(lambda sample: self.create(f"{sample_path(sample.key)}/{RECORD}", sample.record), samples)
        )
        for sample in samples:
            shutil.rmtree(sample.directory)
        return published

    def _upload(self, sample: Publication, path: str, size: int, crc: int) -> None:
        data = (sample.directory / path).read_bytes()
        if len(data) != size or google_crc32c.value(data) != crc:
            raise StorageFailure(
                f"sample {sample.key}: staged file {sample.directory / path} was altered after it was written; check "
                "the disk that holds the staging directory"
            )
        self.put(f"{sample_path(sample.key)}/{path}", data)

    def set_aside(self, key: str) -> None:
        self.remove(f"{sample_path(key)}/{RECORD}")
        self.remove(sample_path(key))

    def lease(self, run: str, share: Share | None = None) -> "ObjectLease":
        return ObjectLease(self, run, share)

    def free_bytes(self) -> int | None:
        return None

    def staging_free_bytes(self) -> int:
        return self._staging.free_bytes()

    def modified(self, path: str) -> datetime:
        """When an object was last written, by the server's clock."""
        return self._try(lambda: obstore.head(self._store, path)["last_modified"])


class ObjectLease:
    """The right to write, as a chain of numbered objects.

    To write, a run creates the next number, which only one can do; it may if every object before is free, or of a
    share of the same group with another name. A holder writes its own object again every 20 s; one that was not
    written for 120 s, or that says it is released, is free. Before it commits, a holder looks for a later number that
    shuts it out.
    """

    _CHAIN = f"{PRIVATE}/lease"

    def __init__(self, backend: ObjectBackend, run: str, share: Share | None = None) -> None:
        self._backend = backend
        self._share = share
        self._owner = owner(run, share)
        self._harmless: set[int] = set()
        while True:
            holders = {number: self._holder(number) for number in self._numbers()}
            for number, holder in holders.items():
                if self._excludes(holder) and not self._is_free(number, holder):
                    raise busy(backend.url, holder)
            self._number = max(holders, default=0) + 1
            if backend.create(self._path(self._number), self._content(released=False)):
                break
        for number, holder in holders.items():
            if self._excludes(holder) or holder.get("released", True):
                backend.remove(self._path(number))
        self._lost = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store-lease", daemon=True)
        self._thread.start()

    def _path(self, number: int) -> str:
        return f"{self._CHAIN}/{number:08d}.json"

    def _content(self, released: bool) -> bytes:
        beat = datetime.now(UTC).isoformat()
        return json.dumps({**self._owner, "token": id(self), "beat": beat, "released": released}).encode()

    def _numbers(self) -> list[int]:
        return [int(name.split(".")[0]) for name in self._backend.names(self._CHAIN)]

    def _holder(self, number: int) -> dict[str, Any]:
        try:
            holder = json.loads(self._backend.read(self._path(number)))
        except (FileNotFoundError, ValueError):
            return {}
        return dict(holder)

    def _excludes(self, holder: Mapping[str, Any]) -> bool:
        """Whether this lease cannot be in force together with the holder's."""
        if self._share is None or not holder:
            return bool(holder)
        return holder.get("group") != self._share.group or holder["share"] == self._share.name

    def _taken_over(self) -> bool:
        numbers = self._numbers()
        later = {number for number in numbers if number > self._number} - self._harmless
        if self._number not in numbers or any(self._excludes(self._holder(number)) for number in later):
            return True
        self._harmless |= later
        return False

    def _is_free(self, number: int, holder: Mapping[str, Any]) -> bool:
        if holder.get("released", True):
            return True
        if holder.get("host") == self._owner["host"] and not _is_alive(int(holder["pid"])):
            return True
        try:
            written = self._backend.modified(self._path(number))
        except FileNotFoundError:
            return True
        return datetime.now(UTC) - written > timedelta(seconds=_STALE_S)

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(_HEARTBEAT_S):
            try:
                if self._taken_over():
                    self._lost.set()
                    return
                self._backend.put(self._path(self._number), self._content(released=False))
                last = time.monotonic()
            except StoreError:
                if time.monotonic() - last > _STALE_S - _HEARTBEAT_S:
                    self._lost.set()
                    return

    def check(self) -> None:
        if self._lost.is_set() or self._taken_over():
            self._lost.set()
            raise StoreBusy(
                f"another run has taken over {self._backend.url}, since this one gave no sign of life for "
                f"{_STALE_S:.0f} s; nothing more is written, and a rerun continues from what is committed"
            )

    def release(self) -> None:
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join()
        if not self._lost.is_set():
            with contextlib.suppress(StoreError):
                self._backend.put(self._path(self._number), self._content(released=True))


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
