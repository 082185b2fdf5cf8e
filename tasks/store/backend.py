"""What the store asks of the place it is kept in.

:mod:`tasks.store.local` answers for a file system, :mod:`tasks.store.object_store` for S3 and the like. A path is
relative to the store, with forward slashes.
"""

import os
import socket
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit
from urllib.request import url2pathname

from tasks.store.errors import StoreBusy
from tasks.store.links import Links
from tasks.vocabulary import Objects

Expected = tuple[str, Sequence[str], Sequence[int]]
"""A committed sample as the manifest has it: key, its files relative to the sample, and their bytes."""


@dataclass(frozen=True)
class Publication:
    """A sample whose files are staged, to be committed."""

    directory: Path
    key: str
    objects: Objects
    record: bytes
    """The completion record, not yet written."""


@dataclass(frozen=True)
class Share:
    """The part in a store of one of several runs that fill it together, each with keys that no other one has."""

    group: str
    """Name of those that write together. While one of them does, no other run and no other group may."""
    name: str
    """Of this part of the group's work. One process holds it at a time; one that takes it over shuts the last out."""


class Lease(Protocol):
    """The right to write to a store, held by one run at a time, or by the shares of one group."""

    def check(self) -> None:
        """Raise :class:`StoreBusy` if another run has taken the store or this run's share over."""

    def release(self) -> None: ...


class Files(Protocol):
    """Files of one store, to read."""

    url: str

    def read(self, path: str) -> bytes:
        """Content of a file; FileNotFoundError where there is none."""

    def read_all(self, paths: Sequence[str]) -> Iterator[bytes | None]:
        """Contents of files in this order, None for a missing one; fetches a few ahead where that pays."""

    def read_summed(self, paths: Sequence[str]) -> Iterator[tuple[memoryview, int] | None]:
        """As :meth:`read_all`, with the crc32c of each. A content is valid until the next one is taken."""

    def names(self, directory: str) -> list[str]:
        """Names directly in a directory, sorted; empty where there is none."""


class Backend(Files, Protocol):
    """Files of one store, to read and write."""

    links: Links | None
    """By which samples share equal chunks; None where the place has no hard links."""

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a file, atomically and durably."""

    def put_all(self, documents: Mapping[str, bytes]) -> None:
        """As :meth:`put` for many small files at about the cost of one."""

    def remove(self, path: str) -> None:
        """Remove a file or a directory with all in it, if it is there."""

    def incomplete(self, expected: Iterable[Expected]) -> Iterator[str]:
        """Keys of which a file is missing or has another size.

        An object store may look for samples only, not for each of their files, where there are very many.
        """

    def shared_file(self, path: str) -> Hashable | None:
        """What tells the file apart that is behind this path and others; None if it has no other, or is not there."""

    def shared_bytes(self, expected: Iterable[Expected]) -> int:
        """Bytes that the samples' files would take besides, if none were a link to another's."""

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of each file in a directory and below, by path relative to it; empty where there is none."""

    def staging(self, run: str) -> Path:
        """A local directory for a run's staged samples, with the owner's liveness recorded."""

    def drop_staging(self, directory: Path) -> None:
        """Remove a staging directory of this process."""

    def collect_staging(self, *, alone: bool = True) -> int:
        """Remove what dead runs left behind before a commit; returns the number of their staging directories.

        Where others write too, what cannot be told from theirs is left.
        """

    def publish(self, samples: Sequence[Publication]) -> list[bool]:
        """Commit samples whose keys are free; returns for each whether it was, False where another run was first."""

    def set_aside(self, key: str) -> None:
        """Take a damaged or half-written sample out of the way."""

    def lease(self, run: str, share: Share | None = None) -> Lease:
        """Take the right to write, alone or as a share; StoreBusy where a live run holds it."""

    def free_bytes(self) -> int | None:
        """Room left, where the place has such a limit."""

    def staging_free_bytes(self) -> int:
        """Room left where samples are staged."""


def open_backend(url: str | os.PathLike[str], staging_dir: Path | None = None) -> Backend:
    """Backend for a path, a ``file://`` URL, or any URL that obstore knows, such as ``s3://bucket/prefix``.

    Args:
        url: Where the store is.
        staging_dir: Local directory to stage in for an object store; the system's temporary directory by default.
    """
    from tasks.store.local import LocalBackend

    text = os.fspath(url)
    parts = urlsplit(text)
    if parts.scheme == "file":
        return LocalBackend(Path(url2pathname(parts.path)))
    if "://" in text:
        from tasks.store.object_store import ObjectBackend

        return ObjectBackend(text, staging_dir)
    return LocalBackend(Path(text).expanduser())


def open_files(url: str | os.PathLike[str]) -> Files:
    """As :func:`open_backend`, to read only; works in a forked process too."""
    text = os.fspath(url)
    if "://" in text and not text.startswith("file:"):
        from tasks.store import object_store

        if os.getpid() != object_store.IMPORTED_IN:
            from tasks.store.relay import Relay

            return Relay(text)
    return open_backend(text)


def owner(run: str, share: Share | None = None) -> dict[str, object]:
    """Who holds something, for people to read."""
    part = {} if share is None else {"group": share.group, "share": share.name}
    return {"run": run, "host": socket.gethostname(), "pid": os.getpid(), **part}


def busy(url: str, holder: Mapping[str, object]) -> StoreBusy:
    """The error for a store that another run is writing to."""
    of_group = f" of {holder['group']}" if holder.get("group") else ""
    return StoreBusy(
        f"{url} is being written by run {holder.get('run')}{of_group} (host {holder.get('host')}, process "
        f"{holder.get('pid')}); one run, or the shards of one fleet, write to a store at a time: wait for it to end, "
        "or choose another store"
    )
