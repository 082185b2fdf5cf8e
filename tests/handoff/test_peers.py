"""What is exported is read by the trainers' own released code, and is what the store holds."""

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infra.peers import environment
from tasks.handoff.export import Export
from tasks.handoff.formats import by_name
from tasks.store import open as open_store
from tasks.store.eagle import EagleDataset, shift
from tests.handoff.conftest import AUX, IDENTITY, NORM, VOCAB, Source, states

HERE = Path(__file__).parent
MAX_LEN = 64
"""Of the readers; the long sample is cut there."""
DRAFT_VOCAB = 40

Tensors = dict[str, torch.Tensor]
ROWS = [IDENTITY.depths.index(depth) for depth in (*AUX, 30)]


def exported(store: Path, name: str, directory: Path) -> Path:
    with Export(open_store(store), by_name(name), directory) as target:
        pending, report = target.pending()
        report.add(target.write(pending))
        target.finish(report, VOCAB, DRAFT_VOCAB)
    assert report.complete
    return directory


def read_by(peer: str, script: str, *arguments: object) -> Tensors:
    command = [environment(peer), HERE / script, *arguments]
    done = subprocess.run(
        [str(each) for each in command], capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return load_file(str(arguments[1]))


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(found, wanted)


def aux(source: Source) -> torch.Tensor:
    """[T, 3 * H]"""
    return torch.cat([states(source.sample)[row] for row in ROWS[:-1]], dim=1)


def ids(source: Source) -> torch.Tensor:
    return torch.from_numpy(source.sample.input_ids.astype(np.int64))


def mask(source: Source) -> torch.Tensor:
    return torch.from_numpy(source.loss_mask.astype(np.int64))


@pytest.fixture(scope="module")
def speculators(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    directory = tmp_path_factory.mktemp("peer")
    export = exported(made_up, "speculators", directory / "export")
    out = directory / "read.safetensors"
    found = read_by("speculators", "read_speculators.py", export, out, DRAFT_VOCAB, VOCAB)
    for name in ("d2t", "t2d"):  # where its trainer looks for them, and what it would have chosen itself
        np.testing.assert_array_equal(np.load(export / f"{name}-{DRAFT_VOCAB}.npy"), found[name].numpy())
    return found


def test_speculators_reads_what_the_store_holds(speculators: Tensors, sources: list[Source]) -> None:
    assert speculators["lengths"].tolist() == [len(each.loss_mask) for each in sources]
    for i, source in enumerate(sources):
        assert same(speculators[f"{i}.hidden_states"], aux(source))
        assert same(speculators[f"{i}.verifier_last_hidden_states"], states(source.sample)[-1])
        assert same(speculators[f"{i}.input_ids"], ids(source))
        assert same(speculators[f"{i}.loss_mask"], mask(source))


def test_speculators_shifts_as_it_defines(speculators: Tensors, sources: list[Source]) -> None:
    """State t beside token t + 1 and the target's state at t + 1; nothing is left of one token."""
    for i, source in enumerate(sources):
        assert same(speculators[f"{i}.shifted.hidden_states"], aux(source)[:-1])
        assert same(speculators[f"{i}.shifted.verifier_last_hidden_states"], states(source.sample)[-1, 1:])
        assert same(speculators[f"{i}.shifted.input_ids"], ids(source)[1:])
        assert same(speculators[f"{i}.shifted.loss_mask"], mask(source)[1:])
    assert speculators["0.shifted.input_ids"].numel() == 0


def test_speculators_packs_and_cuts_at_the_batch_s_end(speculators: Tensors, sources: list[Source]) -> None:
    before = sum(len(each.loss_mask) - 1 for each in sources[:3])  # one token, six, eleven
    assert speculators["batch.input_ids"].shape == (1, MAX_LEN)
    assert same(speculators["batch.input_ids"][0, before:], ids(sources[3])[1:][: MAX_LEN - before])
    assert same(speculators["batch.hidden_states"][0, before:], aux(sources[3])[: MAX_LEN - before])
    assert not speculators["batch.loss_mask"][0, 6:before].any()  # the sample without supervision


def test_the_store_is_a_data_set_for_speculators(speculators: Tensors, made_up: Path, sources: list[Source]) -> None:
    """Item by item what its own data set reads from an export, and shifted as by its own function."""
    data = EagleDataset(made_up, AUX)
    assert data.approx_lengths == speculators["lengths"].tolist()
    assert data.hidden_states_dtype == torch.bfloat16
    for i in range(len(sources)):
        item = data[i]
        for name, value in item.items():
            assert same(value, speculators[f"{i}.{name}"]), name
        for name, value in shift(item).items():
            assert same(value, speculators[f"{i}.shifted.{name}"]), name


@pytest.fixture(scope="module")
def specforge(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    directory = tmp_path_factory.mktemp("peer")
    export = exported(made_up, "specforge", directory / "export")
    mapping = torch.load(export / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
    assert mapping["t2d"].sum() == DRAFT_VOCAB
    assert mapping["t2d"][torch.arange(DRAFT_VOCAB) + mapping["d2t"]].all()
    return read_by("specforge", "read_specforge.py", export, directory / "read.safetensors")


def without_last(mask_T: torch.Tensor) -> torch.Tensor:
    """Its reader takes no loss at the last token."""
    return torch.cat([mask_T[:-1], torch.zeros_like(mask_T[-1:])])


def test_specforge_reads_what_the_store_holds(specforge: Tensors, sources: list[Source]) -> None:
    assert specforge["lengths"].tolist() == [len(each.loss_mask) for each in sources]
    for i, source in enumerate(sources):
        assert same(specforge[f"{i}.hidden_state"], aux(source)[None])
        assert same(specforge[f"{i}.target"], NORM.apply(states(source.sample)[-1])[None])
        assert same(specforge[f"{i}.input_ids"], ids(source)[None])
        assert same(specforge[f"{i}.loss_mask"], without_last(mask(source))[None])


def test_specforge_shifts_as_it_defines(specforge: Tensors, sources: list[Source]) -> None:
    """Tokens and targets move one to the front and are filled with zeros; states stay."""
    for i, source in enumerate(sources):
        target_TH = NORM.apply(states(source.sample)[-1])
        moved_TH = torch.cat([target_TH[1:], torch.zeros_like(target_TH[:1])])
        moved_T = torch.cat([ids(source)[1:], torch.zeros_like(ids(source)[:1])])
        assert same(specforge[f"{i}.shifted.target"], moved_TH[None])
        assert same(specforge[f"{i}.shifted.input_ids"], moved_T[None])


def test_specforge_cuts_and_pads(specforge: Tensors, sources: list[Source]) -> None:
    assert specforge["batch.input_ids"].shape == (len(sources), MAX_LEN)
    for i, source in enumerate(sources):
        length = min(MAX_LEN, len(source.loss_mask))
        assert same(specforge["batch.hidden_state"][i, :length], aux(source)[:length])
        assert same(specforge["batch.loss_mask"][i, :length], without_last(mask(source)[:length]))
        assert specforge["batch.attention_mask"][i].sum() == length


@pytest.fixture(scope="module")
def model_optimizer(made_up: Path, tmp_path_factory: pytest.TempPathFactory) -> Tensors:
    directory = tmp_path_factory.mktemp("peer")
    export = exported(made_up, "model-optimizer", directory / "export")
    d2t = torch.load(export / "d2t.pt", weights_only=True)
    assert (d2t.dtype, d2t.shape) == (torch.int64, (DRAFT_VOCAB,))
    return read_by("model-optimizer", "read_model_optimizer.py", export, directory / "read.safetensors")


def test_model_optimizer_reads_what_the_store_holds(model_optimizer: Tensors, sources: list[Source]) -> None:
    for i, source in enumerate(sources):
        assert same(model_optimizer[f"{i}.aux_hidden_states"], aux(source))
        assert same(model_optimizer[f"{i}.base_model_hidden_states"], NORM.apply(states(source.sample)[-1]))
        assert same(model_optimizer[f"{i}.input_ids"], ids(source))
        assert same(model_optimizer[f"{i}.loss_mask"], mask(source))
        assert not model_optimizer[f"{i}.base_hidden_prenorm"]


def test_model_optimizer_shifts_as_it_defines(model_optimizer: Tensors, sources: list[Source]) -> None:
    """Labels are the next tokens, and none at the last."""
    for i, source in enumerate(sources):
        assert model_optimizer[f"{i}.labels"].tolist() == [*source.sample.input_ids[1:].tolist(), -100]


def test_model_optimizer_cuts_and_pads(model_optimizer: Tensors, sources: list[Source]) -> None:
    assert model_optimizer["batch.input_ids"].shape == (len(sources), MAX_LEN)
    for i, source in enumerate(sources):
        length = min(MAX_LEN, len(source.loss_mask))
        assert same(model_optimizer["batch.aux_hidden_states"][i, :length], aux(source)[:length])
        assert same(model_optimizer["batch.loss_mask"][i, :length], mask(source)[:length])
        assert not model_optimizer["batch.loss_mask"][i, length:].any()
