"""The training proof's script runs on a store, if only for a moment; its figures are in infra/bench/RESULTS.md."""

import json
import os
import subprocess
from pathlib import Path

from infra.peers import ROOT, environment
from tests.handoff.conftest import Real


def test_speculators_trainer_learns_from_the_store(real: Real, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [environment("speculators"), "-m", "infra.bench.train_eagle3", "--store", real.store, "--json", figures]
    command += ["--variants", "right", "--epochs", 3, "--batch-tokens", 128, "--draft-vocab", 100]
    done = subprocess.run(
        [str(each) for each in command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (run,) = json.loads(figures.read_text())
    assert run["losses"][-1] < run["losses"][0]
    assert run["held_out_loss"][1] < run["held_out_loss"][0]
    assert len(run["agreement"]) == 4
    assert "| trained on | loss by epoch |" in done.stdout
