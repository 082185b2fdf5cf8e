"""Environments of the projects that read what is exported: their released packages, each apart from the others.

``.peers/NAME`` in this checkout is a virtual environment that sees the packages of the one it was made from (torch,
numpy, safetensors) behind its own, which are pinned in ``infra/peers/NAME.txt`` and installed without their
dependencies: these are large, and what they need for reading files is there.
"""

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
NAMES = ("speculators", "specforge", "model-optimizer")


def environment(name: str) -> Path:
    """The Python of a peer's environment, which is made or renewed if needed.

    Raises:
        RuntimeError: pip could not install the packages.
    """
    packages = HERE / f"{name}.txt"
    directory = ROOT / ".peers" / name
    recipe = hashlib.sha256(
        packages.read_bytes() + Path(__file__).read_bytes() + sys.prefix.encode() + str(directory).encode()
    ).hexdigest()
    stamp = directory / "recipe"
    python = directory / "bin" / "python"
    directory.parent.mkdir(exist_ok=True)
    with _lock(directory.parent / f"{name}.lock"):
        if not stamp.exists() or stamp.read_text() != recipe:
            _make(name, directory, python, packages)
            stamp.write_text(recipe)
    return python


def _make(name: str, directory: Path, python: Path, packages: Path) -> None:
    print(f"installing {name} into {directory}", file=sys.stderr)
    venv.create(directory, clear=True, symlinks=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    (directory / "lib" / version / "site-packages" / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--no-input", "--no-compile", "--requirement", str(packages)]
    if subprocess.run(command).returncode:
        raise RuntimeError(f"pip could not install what {packages} lists; it needs a package registry the first time")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
