"""The reference itself: its states are the residual stream, and its models know what they were trained for."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tasks.verify.reference import decoder, load, residual_states
from tests.checkpoints import byte_tokenizer, checkpoint_path

TINY = ("llama", "qwen3", "deepseek", "kimi")
IDS = np.random.default_rng(1).integers(0, 256, size=40)


@pytest.mark.parametrize("name", TINY)
def test_states_lead_from_the_embedding_to_the_logits(name: str) -> None:
    path = checkpoint_path(name)
    model = load(path)
    stack = decoder(model)
    num_layers = len(stack.layers)
    states_LTH = residual_states(path, IDS, range(num_layers + 1))
    assert states_LTH.shape == (num_layers + 1, len(IDS), 256)

    with torch.inference_mode():
        ids = torch.as_tensor(IDS)[None]
        torch.testing.assert_close(states_LTH[0], stack.embed_tokens(ids)[0], rtol=0, atol=0)
        logits_TV = model(input_ids=ids, use_cache=False).logits[0]
        torch.testing.assert_close(model.lm_head(stack.norm(states_LTH[-1])), logits_TV, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", TINY)
def test_every_layer_and_every_token_has_states_of_its_own(name: str) -> None:
    """Otherwise a capture that is off by a layer or by a row would go unseen."""
    path = checkpoint_path(name)
    states_LTH = residual_states(path, IDS, range(len(decoder(load(path)).layers) + 1))
    for before_TH, after_TH in pairwise(states_LTH):
        assert ((after_TH - before_TH).norm(dim=1) / before_TH.norm(dim=1)).min() > 0.05
    for states_TH in states_LTH:
        assert ((states_TH[1:] - states_TH[:-1]).norm(dim=1) / states_TH[1:].norm(dim=1)).min() > 0.05
        assert 0.1 < states_TH.square().mean().sqrt() < 100


def test_depths_come_in_the_order_asked_for() -> None:
    path = checkpoint_path("llama")
    ascending_LTH = residual_states(path, IDS, (1, 4, 6))
    torch.testing.assert_close(residual_states(path, IDS, (6, 1, 4)), ascending_LTH[[2, 0, 1]], rtol=0, atol=0)


def test_padded_heads_change_no_state() -> None:
    ids = AutoTokenizer.from_pretrained(checkpoint_path("smollm2"))("Water boils at 100 degrees.").input_ids
    depths = (0, 1, 15, 30)
    plain_LTH = residual_states(checkpoint_path("smollm2"), ids, depths)
    padded_LTH = residual_states(checkpoint_path("smollm2", tensor_parallel_size=2), ids, depths)
    torch.testing.assert_close(padded_LTH, plain_LTH, rtol=1e-4, atol=1e-3)


def test_smollm2_answers_as_trained() -> None:
    path = checkpoint_path("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(path)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = load(path).generate(**ids, max_new_tokens=12, do_sample=False)
    assert "Paris" in tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])


def test_smollm2_reads_every_digit_by_itself() -> None:
    tokenizer = AutoTokenizer.from_pretrained(checkpoint_path("smollm2"))
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer("日本 １２３ ½ 🙂").input_ids) == "日本 １２３ ½ 🙂"


def test_byte_tokenizer_marks_what_the_assistant_says() -> None:
    tokenizer = byte_tokenizer()
    messages = [
        {"role": "user", "content": "Grüße"},
        {"role": "assistant", "content": "hi", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    ]
    encoded = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
    said = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    assert tokenizer.decode(said) == 'hi<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call><|im_end|>'
