"""What is shipped when code is copied to storage, and the files that set Prefect up."""

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.filesystem import filter_files

from flows.config import PRESETS, Extraction
from flows.presets import load
from infra import automations

# Prefect's own use of its library.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")

ROOT = Path(__file__).parent.parent.parent

#: A tree as it is where the project is at work: files that must stay where they are.
LOCAL = [
    ".venv/bin/python",
    ".venv/lib/python3.11/site-packages/torch/__init__.py",
    "venv/pyvenv.cfg",
    ".env",
    ".env.production",
    ".netrc",
    ".git/config",
    ".aws/credentials",
    ".ssh/id_ed25519",
    "id_rsa",
    "credentials.json",
    "infra/server.key",
    "infra/server.pem",
    "infra/secrets/token",
    "secrets.yaml",
    "stores/smollm2/zarr.json",
    "stores/smollm2/samples/ab/abcd/hidden_states/c.0.0.0",
    "results/states.zarr/zarr.json",
    "models/kimi/model-00001-of-00062.safetensors",
    "model.safetensors",
    "adapter.bin",
    "chats.jsonl",
    "data/chats.jsonl.zst",
    "data/chats.parquet",
    "flows/__pycache__/cli.cpython-311.pyc",
    "tasks/store/__pycache__/store.cpython-311.pyc",
    ".cache/huggingface/hub/x",
    ".pytest_cache/v/cache/lastfailed",
    ".mypy_cache/3.11/x.json",
    ".ruff_cache/x",
    ".hypothesis/examples/x",
    "layertap.egg-info/PKG-INFO",
    "infra/bench/output/figures.json",
    "tests/output/ui.png",
    "logs/run.txt",
    "prefect.log",
    "audit.html",
]


def tracked() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split()


def test_code_is_shipped_and_nothing_else(tmp_path: Path) -> None:
    """By the function with which Prefect itself reads the file."""
    for name in tracked():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in LOCAL:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = (ROOT / ".prefectignore").read_text(encoding="utf-8").splitlines()
    shipped = {str(path) for path in filter_files(str(tmp_path), patterns, include_dirs=False)}
    assert shipped & set(LOCAL) == set()
    needed = {name for name in tracked() if name.startswith(("flows/", "tasks/", "infra/", "pyproject.toml"))}
    assert {"flows/extract.py", "tasks/extract/engine.py", "infra/presets/kimi-k25.yaml", "infra/prefect.yaml"} < needed
    assert shipped >= needed
    assert shipped - needed <= {".prefectignore", "README.md"}


def test_what_is_shipped_can_be_imported(tmp_path: Path) -> None:
    patterns = (ROOT / ".prefectignore").read_text(encoding="utf-8").splitlines()
    shipped = filter_files(str(ROOT), patterns, include_dirs=False)
    for name in sorted(shipped & set(tracked())):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    code = (
        "from flows.config import Extraction; import tasks.store, tasks.tokenize.pipeline; Extraction.load('kimi-k25')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, check=True)


def test_every_preset_has_its_deployments() -> None:
    deployments = yaml.safe_load((ROOT / "infra" / "prefect.yaml").read_text(encoding="utf-8"))["deployments"]
    for entrypoint in ("flows/extract.py:extract", "flows/audit.py:audit"):
        names = {each["name"] for each in deployments if each["entrypoint"] == entrypoint}
        assert names >= {path.stem for path in PRESETS.glob("*.yaml")}


def test_a_deployment_s_parameters_are_the_preset_s() -> None:
    for preset in PRESETS.glob("*.yaml"):
        values = load(preset.stem)["extraction"]
        assert json.loads(json.dumps(values)) == values
        assert Extraction.model_validate(values) == Extraction.load(preset.stem)


def test_dead_runs_are_known_by_three_missing_heartbeats() -> None:
    (automation,) = automations.load()
    trigger: Any = automation.trigger
    assert trigger.within.total_seconds() == 90
    assert trigger.after == {"prefect.flow-run.heartbeat"}


def test_the_compose_file_holds_no_secret_and_the_server_s_settings() -> None:
    text = (ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8")
    services = yaml.safe_load(text)["services"]
    assert services["database"]["environment"]["POSTGRES_PASSWORD"].startswith("${POSTGRES_PASSWORD:?")
    server = services["server"]["environment"]
    assert server["PREFECT_SERVER_DATABASE_CONNECTION_URL"] == (
        "postgresql+asyncpg://prefect:${POSTGRES_PASSWORD}@database:5432/prefect"
    )
    shipped = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["prefect"]
    for name, value in shipped["server"]["services"]["task_run_recorder"].items():
        assert server[f"PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_{name.upper()}"] == str(value)
