"""One file for equal chunks: hard links between samples of a local store.

``.layertap/links/<first two digits>/<name>`` is a further link to a chunk's file, named by the bits of the elements in
it. A sample that has the same bits links to it instead of encoding and writing them again. To every reader each link is
a file of its own; a tool that copies them apart costs space and nothing else.

The directory is its own index, for this run and for later ones: an entry is made when its file is whole, and one that a
loss of power has torn is found by the checksum that ends every chunk's file, and is replaced. Entries whose samples are
gone are the only link to their file, and go with `layertap gc`.
"""

import errno
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import google_crc32c
import numpy as np
import numpy.typing as npt
import xxhash

from tasks.store.layout import CRC_BYTES
from tasks.vocabulary import ChunkGone

#: The file system has no hard links, or none from here to there; then every chunk is a file of its own.
_NO_LINKS = frozenset({errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EACCES})


def content_name(elements: npt.NDArray[np.generic]) -> str:
    """Name of a chunk by the bits of its elements: 128 bits of xxh3, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(elements).data.cast("B"))


class Links:
    """The links of one store; may be used from several threads and processes."""

    def __init__(self, directory: Path) -> None:
        """Use :func:`links_in`."""
        self.directory = directory
        self.possible = True
        self._known: dict[str, tuple[int, int]] = {}
        self._turns = [threading.Lock() for _ in range(1024)]

    def share(self, name: str, path: str, write: Callable[[], tuple[int, int]]) -> tuple[int, int]:
        """Make ``path`` a link to the chunk of this name; the first one is written there and offered to others.

        Args:
            name: :func:`content_name` of the chunk.
            path: where it should be; what is there is replaced.
            write: writes it there, and returns its bytes and crc32c.

        Returns:
            Its bytes and crc32c.
        """
        # Of threads with equal chunks one writes, and the others wait for it: that is faster than to encode them, too.
        with self._turns[hash(name) % len(self._turns)]:
            return self._reuse(name, path) or self._offer(name, path, write())

    def link(self, name: str, path: str) -> tuple[int, int]:
        """Make ``path`` a link to the chunk of this name, which must be there.

        Returns:
            Its bytes and crc32c.

        Raises:
            ChunkGone: it is not there, or can have no more links.
        """
        with self._turns[hash(name) % len(self._turns)]:
            if (known := self._reuse(name, path)) is None:
                raise ChunkGone(f"chunk {name} cannot be linked to any more")
            return known

    def _reuse(self, name: str, path: str) -> tuple[int, int] | None:
        """Link to a chunk: its bytes and crc32c. None if it cannot be done; ``path`` is then as it was."""
        if not self.possible:
            return None
        entry = self._entry(name)
        known = self._known.pop(name, None) or self._examine(entry)
        if known is None:
            return None
        try:
            _link(entry, path)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EMLINK:  # the next copy takes the place of the one that can have no more links
                with suppress(FileNotFoundError):
                    entry.rename(entry.with_name(f"{name}.{uuid.uuid4().hex[:8]}"))
            else:
                self._give_up(error)
            return None
        self._known[name] = known
        return known

    def _offer(self, name: str, path: str, known: tuple[int, int]) -> tuple[int, int]:
        if not self.possible:
            return known
        entry = self._entry(name)
        try:
            try:
                os.link(path, entry)
            except FileNotFoundError:  # the first of its directory
                entry.parent.mkdir(parents=True, exist_ok=True)
                os.link(path, entry)
        except FileExistsError:  # another process was faster
            return self._reuse(name, path) or known
        except OSError as error:
            self._give_up(error)
            return known
        self._known[name] = known
        return known

    def _give_up(self, error: OSError) -> None:
        if error.errno not in _NO_LINKS:
            raise error
        self.possible = False

    def entries(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All entries, with what the file system says of each."""
        for shard in sorted(self.directory.iterdir()) if self.directory.is_dir() else []:
            for entry in sorted(shard.iterdir()):
                with suppress(FileNotFoundError):
                    yield entry, entry.stat()

    def collect(self) -> tuple[int, int]:
        """Remove the entries to which no sample links; returns their number and bytes."""
        number = nbytes = 0
        for entry, status in self.entries():
            if status.st_nlink == 1:
                entry.unlink(missing_ok=True)
                number, nbytes = number + 1, nbytes + status.st_size
        return number, nbytes

    def _entry(self, name: str) -> Path:
        return self.directory / name[:2] / name

    def _examine(self, entry: Path) -> tuple[int, int] | None:
        """Bytes and crc32c of an entry that another process has made; a torn or damaged one is taken away."""
        try:
            content = entry.read_bytes()
        except FileNotFoundError:
            return None
        payload, checksum = content[:-CRC_BYTES], content[-CRC_BYTES:]
        crc = google_crc32c.value(payload)
        if not payload or crc.to_bytes(CRC_BYTES, "little") != checksum:
            entry.unlink(missing_ok=True)
            return None
        return len(content), google_crc32c.extend(crc, checksum)


def _link(entry: Path, path: str) -> None:
    try:
        os.link(entry, path)
    except FileExistsError:  # what an earlier attempt has staged
        spare = f"{path}.{uuid.uuid4().hex[:8]}"
        os.link(entry, spare)
        os.replace(spare, path)  # noqa: PTH105
        with suppress(FileNotFoundError):  # two links to one file both stay
            os.unlink(spare)  # noqa: PTH108


@lru_cache(maxsize=8)
def links_in(directory: str) -> Links:
    """The links in a directory; the same object for a process's threads, so that what one has seen others know."""
    return Links(Path(directory))
