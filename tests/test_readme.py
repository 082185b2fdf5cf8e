"""Every command of the README runs, and does what the README says."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from flows.cli import app
from flows.config import Extraction
from tests.checkpoints import checkpoint_path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [
    line.split("#")[0].strip()
    for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL)
    for line in block.splitlines()
    if line.strip()
]
PRESET = next(re.finditer(r"```yaml\n(.*?)```", README, re.DOTALL)).group(1)
PYTHON = next(re.finditer(r"```python\n(.*?)```", README, re.DOTALL)).group(1)
ON_MY_STORE = [c for c in COMMANDS if c.startswith(".venv/bin/layertap") and ("mine" in c or "my.yaml" in c)]


def test_the_commands_are_those_that_are_run_here() -> None:
    assert [c for c in COMMANDS if c not in ON_MY_STORE] == [
        "bash infra/demo",
        "bash infra/test",
        '.venv/bin/layertap doctor "771*[512]" --layers 4 --hidden 7168 --lengths 512,259',
        # by tests/flows/test_deployments.py, at other ports
        "bash infra/deploy",
        "export PREFECT_API_URL=http://127.0.0.1:4200/api PREFECT_UI_URL=http://127.0.0.1:4200/v2",
        ".venv/bin/prefect deployment run extract/smollm2-cpu --param limit=10 --param store=stores/ten --watch",
        ".venv/bin/layertap doctor --prefect",
    ]


def test_the_example_is_a_valid_configuration() -> None:
    Extraction.model_validate(yaml.safe_load(PRESET))


def test_both_scripts_are_there() -> None:
    assert (ROOT / "infra" / "demo").is_file()
    assert "infra/test" in (ROOT / ".ci" / "run").read_text()


def test_the_doctor_s_example() -> None:
    (command,) = [c for c in COMMANDS if " doctor " in c and "--prefect" not in c]
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0
    assert "771 = 512 + 259" in result.output


@pytest.mark.engine
def test_the_commands_on_one_s_own_model_and_data(
    prefect_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mine: dict[str, Any] = yaml.safe_load(PRESET)
    mine["model"]["path"] = str(checkpoint_path("llama"))
    mine["layers"]["ids"] = [0, 2, 4, 5]  # the model of the test has 6 layers
    mine["dtype"] = "float32"
    mine["engine"] |= {"in_process": True, "kv_cache_gib": 0.1, "staging_gib": 0.1, "max_num_batched_tokens": 512}
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(mine))
    (tmp_path / "chats.jsonl").write_text(
        '{"id": "a", "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n'
        '{"id": "b", "text": "Once upon a time"}\n'
    )
    assert len(ON_MY_STORE) == 10
    for command in ON_MY_STORE:
        command = command.replace("3,15,27", "1,3,5").replace("/models/my-model", mine["model"]["path"])
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, (command, result.output, result.exception)
    assert (tmp_path / "audit.html").is_file()
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    reading = PYTHON.replace("stores/smollm2", "stores/mine").replace("the id in your data", "a")
    names: dict[str, Any] = {}
    exec(reading, names)
    assert names["sample"].hidden_states.shape[0] == 4


@pytest.mark.engine
def test_the_demo_runs_and_runs_again_without_the_engine() -> None:
    shutil.rmtree(ROOT / "stores" / "smollm2", ignore_errors=True)
    first, second = (
        subprocess.run(["bash", "infra/demo"], cwd=ROOT, capture_output=True, text=True, timeout=900) for _ in range(2)
    )
    assert first.returncode == 0, first.stderr[-3000:]
    assert "56 samples" in first.stdout
    assert second.returncode == 0, second.stderr[-3000:]
    assert re.search(r"extracted\W+0 samples", second.stdout)
    assert re.search(r"reused\W+56 samples", second.stdout)
    assert re.search(r"engine\W+not started", second.stdout)
