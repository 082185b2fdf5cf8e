"""The value proof against Hugging Face's own logits, on every architecture, from the checkpoint's tensors alone."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tasks.model import ModelError, read
from tasks.verify.proof import MARGIN, Head
from tasks.verify.reference import load, residual_states
from tests.checkpoints import checkpoint_path

IDS = np.random.default_rng(3).integers(0, 256, size=33)


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek", "kimi", "smollm2"])
def test_the_head_gives_the_model_s_own_tokens(name: str) -> None:
    """SmolLM2's head is tied to its embedding, Kimi's lies inside a multimodal model."""
    checkpoint = read(checkpoint_path(name))
    states_TH = residual_states(checkpoint.path, IDS, [checkpoint.num_layers])[0]
    with torch.inference_mode():
        logits_TV = load(checkpoint.path, torch.float32)(input_ids=torch.as_tensor(IDS)[None]).logits[0]
    head = Head(checkpoint)
    tokens = logits_TV.argmax(dim=1).tolist()
    assert {proof.outcome for proof in head.prove(states_TH, tokens, MARGIN["float32"])} == {"proved"}
    torch.testing.assert_close(
        torch.cat([x for _, x in head.logits(states_TH)], dim=1), logits_TV, rtol=1e-3, atol=1e-3
    )


def test_a_wrong_token_fails_and_a_near_tie_is_told_apart() -> None:
    checkpoint = read(checkpoint_path("llama"))
    states_TH = residual_states(checkpoint.path, IDS, [checkpoint.num_layers])[0]
    head = Head(checkpoint)
    (_, logits_TV), *_ = head.logits(states_TH)
    first, second = logits_TV[5].topk(2).indices.tolist()
    gap = float(logits_TV[5, first] - logits_TV[5, second])
    share = gap / float(logits_TV[5].abs().max())
    row = states_TH[5:6]
    assert head.prove(row, [first], MARGIN["float32"])[0].outcome == "proved"
    failed = head.prove(row, [second], share * 0.9)[0]
    assert (failed.outcome, failed.computed, failed.sampled) == ("failed", first, second)
    assert failed.gap == pytest.approx(gap, rel=1e-3)
    assert head.prove(row, [second], share * 1.1)[0].outcome == "near tie"


@pytest.mark.parametrize(
    "change",
    [lambda r: r.roll(1, dims=0), lambda r: r * 0 + 1, lambda r: -r],
    ids=["shifted", "constant", "negated"],
)
def test_rows_that_are_not_the_sample_s_prove_nothing(change) -> None:  # type: ignore[no-untyped-def]
    checkpoint = read(checkpoint_path("smollm2"))
    states_TH = residual_states(checkpoint.path, IDS, [checkpoint.num_layers])[0]
    head = Head(checkpoint)
    tokens = [proof.computed for proof in head.prove(states_TH, [0] * len(IDS), 0)]
    right = head.prove(states_TH, tokens, MARGIN["bfloat16"])
    wrong = head.prove(change(states_TH), tokens, MARGIN["bfloat16"])
    assert {proof.outcome for proof in right} == {"proved"}
    assert sum(proof.outcome == "failed" for proof in wrong) > len(IDS) // 2


def test_a_checkpoint_without_a_head_is_refused() -> None:
    checkpoint = read(checkpoint_path("smollm2"))
    config = checkpoint.config | {"tie_word_embeddings": False}
    with pytest.raises(ModelError, match="none of the tensors"):
        Head(replace(checkpoint, config=config))
