"""The store as an EAGLE-3 trainer reads it: local and on S3, by workers, with rows that are not shifted."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tasks.store import FinalNorm, Store
from tasks.store.dataset import LengthBucketedBatches
from tasks.store.eagle import EagleDataset, EagleItem, shift
from tests.store.samples import HIDDEN, Made, fill, identity, make

AUX = (3, 15, 28)
IDENTITY = identity(depths=(3, 15, 20, 28, 30), layer_ids=(2, 14, 19, 27, 29))
NORM = FinalNorm(np.random.default_rng(1).normal(1, 0.2, HIDDEN).astype("<f4"), 1e-5)
SAMPLES = [make(IDENTITY, n, seed=n) for n in (1, 5, 300)]


def filled(url: str, norm: FinalNorm | None = NORM) -> str:
    with Store.open(url, IDENTITY, run="test", final_norm=norm) as store:
        fill(store, SAMPLES)
    return url


def check(item: EagleItem, made: Made) -> None:
    states_LTH = torch.from_numpy(made.states).view(torch.bfloat16)
    num_tokens = len(made.input_ids)
    assert torch.equal(item["hidden_states"], torch.cat([states_LTH[0], states_LTH[1], states_LTH[3]], dim=1))
    assert torch.equal(item["verifier_last_hidden_states"], states_LTH[4])
    assert item["hidden_states"].dtype == torch.bfloat16
    assert item["input_ids"].tolist() == made.input_ids.tolist()
    assert item["loss_mask"].tolist() == made.loss_mask.astype(int).tolist()
    assert item["position_ids"].tolist() == list(range(num_tokens))
    assert item["lengths"].tolist() == [num_tokens]


def test_row_t_belongs_to_token_t(url: str) -> None:
    """On each kind of backend."""
    data = EagleDataset(filled(url), AUX)
    assert data.approx_lengths == [1, 5, 300]
    for item, made in zip(data, SAMPLES, strict=False):
        check(item, made)


def test_workers_read_it(tmp_path: Path) -> None:
    data = EagleDataset(filled(str(tmp_path / "s")), AUX)
    batches = LengthBucketedBatches(data.approx_lengths, 300, max_samples=1, shuffle=False)
    loader = DataLoader(
        data, batch_sampler=batches, num_workers=1, multiprocessing_context="spawn", collate_fn=the_only_one
    )
    for item, made in zip(loader, SAMPLES, strict=True):
        check(item, made)


def the_only_one(items: list[EagleItem]) -> EagleItem:
    """A function of this module, so that workers can be started by spawn."""
    return items[0]


def test_the_shift_puts_a_state_beside_the_token_after_it(tmp_path: Path) -> None:
    data = EagleDataset(filled(str(tmp_path / "s")), AUX)
    item, moved = data[1], shift(data[1])
    for t in range(4):
        assert torch.equal(moved["hidden_states"][t], item["hidden_states"][t])
        assert moved["input_ids"][t] == item["input_ids"][t + 1]
        assert torch.equal(moved["verifier_last_hidden_states"][t], item["verifier_last_hidden_states"][t + 1])
        assert moved["loss_mask"][t] == item["loss_mask"][t + 1]
        assert moved["position_ids"][t] == t + 1
    assert moved["lengths"].tolist() == [4]
    assert {name: len(value) for name, value in shift(data[0]).items()} == dict.fromkeys(item, 0) | {"lengths": 1}
    assert shift(data[0])["lengths"].tolist() == [0]


def test_the_last_state_after_the_norm_and_in_another_type(tmp_path: Path) -> None:
    data = EagleDataset(filled(str(tmp_path / "s")), AUX, normed=True, dtype=torch.float32)
    last_TH = torch.from_numpy(SAMPLES[1].states[-1]).view(torch.bfloat16)
    values_TH = last_TH.double()
    scale = (values_TH.square().mean(1, keepdim=True) + NORM.eps).rsqrt()
    expected_TH = values_TH * scale * torch.from_numpy(NORM.weight)
    item = data[1]
    assert item["verifier_last_hidden_states"].dtype == item["hidden_states"].dtype == torch.float32
    torch.testing.assert_close(item["verifier_last_hidden_states"], expected_TH.float(), rtol=2e-2, atol=1e-3)


def test_the_norm_is_hugging_face_s_bit_for_bit() -> None:
    """In bfloat16, too, where the order of rounding and weighting shows."""
    for dtype in (torch.bfloat16, torch.float32):
        theirs = LlamaRMSNorm(HIDDEN, NORM.eps)
        theirs.weight.data = torch.from_numpy(NORM.weight).to(dtype)
        states_TH = (torch.randn(50, HIDDEN, generator=torch.Generator().manual_seed(0)) * 30).to(dtype)
        ours_TH = NORM.apply(states_TH)
        assert ours_TH.dtype == dtype
        assert torch.equal(ours_TH, theirs(states_TH))
        assert (NORM.normed_rows(ours_TH), NORM.normed_rows(states_TH)) == (50, 0)


def test_what_the_store_lacks_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"choose from \[3, 15, 20, 28, 30\]"):
        EagleDataset(filled(str(tmp_path / "s")), (2, 15, 28))
    with pytest.raises(ValueError, match="does not hold the final norm"):
        EagleDataset(filled(str(tmp_path / "t"), norm=None), AUX, normed=True)


def test_tokens_and_masks_alone(url: str) -> None:
    reader = EagleDataset(filled(url), AUX).samples.reader
    for number, made in enumerate(SAMPLES):
        for which in (number, made.key, f"chat-{number}"):
            ids_T, mask_T = reader.tokens(which)
            assert ids_T.tolist() == made.input_ids.tolist()
            assert mask_T.tolist() == made.loss_mask.tolist()
