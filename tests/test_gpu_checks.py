"""The checks that are meant for GPUs run on a CPU, too, and can fail."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from infra.bench import gpu_checks
from infra.bench.gpu_checks import CPU, GPU, findings, prompts, table, write_checkpoints


def run(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "infra.bench.gpu_checks", "--cpu", "--models", "deepseek", "--sizes", "1"]
    command += ["--parts", "states", "--long", "600", "--directory", str(directory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.engine
def test_states_are_checked_against_hugging_face(tmp_path: Path) -> None:
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stdout[-4000:]
    found = [json.loads(line[6:]) for line in ended.stdout.splitlines() if line.startswith("CHECK ")]
    assert [(f["check"], f["holds"]) for f in found] == [
        ("runner", True),
        ("goes on", True),
        ("ranks agree, tokens proved", True),
        ("states", True),
        ("one token", True),
        ("chunked prefill", True),
    ]
    assert found[-1]["steps"] > 1
    assert found[-1]["neighbour_first"] > 0.2

    # The same states compared with those of other weights: what must not hold does not.
    path = tmp_path / "reference-deepseek.safetensors"
    save_file({name: states + 0.01 * states.std() for name, states in load_file(path).items()}, path)
    checks = gpu_checks.Configuration.__new__(gpu_checks.Configuration)
    checks.directory, checks.model, checks.scale, checks.prompts = tmp_path, "deepseek", CPU, prompts(CPU)
    checks.store = type("Opened", (), {"url": str(tmp_path / "store-deepseek-1-v1")})
    from tasks.store import open as open_store

    checks.identity = open_store(checks.store.url).identity
    holds, figures = checks.compare("several")
    assert not holds
    assert figures["median"] > CPU.far


def test_prompts_are_enough_to_force_what_is_to_happen() -> None:
    for scale in (GPU, CPU):
        kinds = prompts(scale)
        assert {len(ids) for ids in kinds["one"]} == {1}
        assert len(kinds["long"][0]) > 2 * scale.step
        count, length = scale.crowd
        assert count * scale.piece <= scale.step, "all of the crowd are in a step together"
        assert count * length > scale.cached >= scale.long, "and do not fit into the cache together"
        assert sum(map(len, kinds["killed"])) > 4 * scale.step


def test_both_checkpoints_hold_the_same_language_model(tmp_path: Path) -> None:
    write_checkpoints(tmp_path, CPU)
    plain = load_file(tmp_path / "deepseek" / "model.safetensors")
    inside = load_file(tmp_path / "kimi" / "model.safetensors")
    assert all(torch.equal(inside[f"language_model.{name}"], weight) for name, weight in plain.items())


def test_what_processes_found_becomes_a_table(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text('noise\nCHECK {"configuration": "a", "check": "states", "holds": true}\n')
    found = [*findings(log), {"configuration": "b", "check": "kill", "holds": False}]
    assert table(found).splitlines() == [
        "configuration  states  kill",
        "a              yes     -   ",
        "b              -       NO  ",
    ]
