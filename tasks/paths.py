"""Paths as they are kept where others see them, and the modes of the files there."""

import re
from pathlib import Path


def from_home(path: Path | str) -> str:
    """The path with ``~`` for the home directory: stores, logs and artifacts tell nobody whose machine it was."""
    home = Path.home()
    if home != Path("/") and Path(path).is_relative_to(home):
        return str("~" / Path(path).relative_to(home))
    return str(path)


def follow_umask(path: Path) -> None:
    """Give a file the mode of any new file; safetensors keeps what it writes to its owner (0600)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(r"^Umask:\s*([0-7]+)$", status, re.MULTILINE)
    assert found is not None
    path.chmod(0o666 & ~int(found[1], 8))  # os.umask tells it only by changing it, for all threads
