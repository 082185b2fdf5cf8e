"""The examples do what they say."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from infra.examples.activations import stream
from infra.peers import ROOT, environment
from tasks.handoff.export import Export
from tasks.handoff.formats import by_name
from tasks.store import open as open_store
from tests.handoff.conftest import Source, states


@pytest.fixture(scope="module")
def activations(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("export") / "activations"
    with Export(open_store(made_up), by_name("safetensors"), directory, (15,)) as target:
        pending, report = target.pending()
        target.write(pending)
        target.finish(report)
    return directory


def rows(directory: Path, **options: int) -> tuple[torch.Tensor, list[int]]:
    """All rows in the order in which they come, and the batches' sizes."""
    batches = list(stream(directory, 15, **options))
    return torch.cat([states_BH for states_BH, _ in batches]), [len(ids_B) for _, ids_B in batches]


@pytest.mark.parametrize("buffer_rows", [1, 16, 64, 100_000])
def test_each_row_comes_once_in_an_order_of_the_seed(
    buffer_rows: int, activations: Path, sources: list[Source]
) -> None:
    distinct = {each.sample.key: each.sample for each in sources}.values()
    wanted = torch.cat([states(made)[2] for made in distinct])
    found, sizes = rows(activations, batch_rows=8, buffer_rows=buffer_rows, seed=1)
    assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, wanted.tolist()))
    assert sizes == [8] * 65  # 520 rows
    assert torch.equal(found, rows(activations, batch_rows=8, buffer_rows=buffer_rows, seed=1)[0])
    assert not torch.equal(found, rows(activations, batch_rows=8, buffer_rows=buffer_rows, seed=2)[0])


def test_states_come_with_their_tokens(activations: Path, sources: list[Source]) -> None:
    long = sources[3].sample
    of = {tuple(row.tolist()): int(token) for row, token in zip(states(long)[2], long.input_ids, strict=True)}
    seen = 0
    for states_BH, ids_B in stream(activations, 15, batch_rows=8, buffer_rows=64):
        for row, token in zip(states_BH, ids_B, strict=True):
            if tuple(row.tolist()) in of:
                assert of[tuple(row.tolist())] == token
                seen += 1
    assert seen == 500


def run(python: str | Path, module: str, *arguments: object) -> str:
    done = subprocess.run(
        [str(each) for each in (python, "-m", f"infra.examples.{module}", *arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_activations_example_runs(activations: Path) -> None:
    assert "520 rows, root mean square" in run(sys.executable, "activations", activations, 15)


def test_the_loader_for_speculators_trainer_runs(made_up: Path) -> None:
    """544 tokens in six conversations, one row less of each, in one batch."""
    output = run(environment("speculators"), "eagle3_loader", made_up, 2, 15, 27)
    assert "'hidden_states': (1, 2048, 96)" in output
    assert "'verifier_last_hidden_states': (1, 2048, 32)" in output
