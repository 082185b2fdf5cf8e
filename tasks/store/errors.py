"""Errors of the store. Each message names the path and says what to do."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from tasks.vocabulary import StagingFailure


class StoreError(Exception):
    """Base of everything the store raises on purpose."""


class IdentityMismatch(StoreError):
    """The store at this place holds another extraction."""


class StoreBusy(StoreError):
    """Another run holds the store for writing."""


class NotAStore(StoreError):
    """Nothing at this place is a layertap store of a layout that this version reads."""


class SampleNotFound(StoreError, KeyError):
    """The store has no such key or source id."""

    __str__ = Exception.__str__


class DamagedSample(StoreError):
    """A committed sample whose files are not what was committed: one is missing, short or altered."""

    _says = (
        "is damaged: {problem}. `layertap verify --set-aside` takes damaged samples out of the store, and the next run "
        "extracts them again"
    )

    def __init__(self, key: str, problem: str | None = None) -> None:
        """Take a key and what is wrong; or a whole message, as a DataLoader raises a worker's error again."""
        if problem is None:
            super().__init__(key)
            return
        super().__init__(f"sample {key} {self._says.format(problem=problem)}")
        self.key = key
        self.problem = problem


class ForeignSample(DamagedSample):
    """A sample whose completion record is whole, but names another identity than the store's root group."""

    _says = "is not damaged, but {problem}. `layertap verify` tells how many are, and how to keep them"


class DamagedStore(StoreError):
    """A file of the store outside of its samples is missing or altered; the message says what mends it."""


class NoSpace(StoreError):
    """The planned samples do not fit."""


class StorageFailure(StoreError, StagingFailure):
    """The disk or the object store refused: full, read-only, no permission, out of reach."""


_ADVICE = {
    errno.ENOSPC: "the disk is full; free space and run again, committed samples are kept",
    errno.EDQUOT: "the disk quota is used up; free space and run again, committed samples are kept",
    errno.EACCES: "permission denied; let the user of this run write there",
    errno.EPERM: "operation not permitted; let the user of this run write there",
    errno.EROFS: "the file system is read-only; mount it writable or choose another store",
    errno.EIO: "the disk reports an input/output error; check the device before running again",
}
#: What stays so until somebody does something.
_LASTING = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS)


@contextmanager
def storage_failures(path: object, action: str = "write") -> Iterator[None]:
    """Turn what a file system refuses into :class:`StorageFailure` with advice.

    A missing or already present file is left as it is, since callers decide what that means.
    """
    try:
        yield
    except (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError):
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, None):
            raise
        advice = _ADVICE.get(error.errno, error.strerror or str(error))
        lasting = error.errno in _LASTING
        raise StorageFailure(f"cannot {action} {error.filename or path}: {advice}", lasting=lasting) from error
