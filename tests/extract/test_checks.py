"""What cannot work is refused before anything is loaded, and the message says what to change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.extract.checks import StartupError, check, check_vllm
from tasks.extract.config import Engine
from tasks.layers import Layers
from tasks.model import Checkpoint

LLAMA = Checkpoint(
    path=Path("llama"),
    fingerprint="files:x",
    architecture="LlamaForCausalLM",
    num_layers=6,
    hidden_size=256,
    vocab_size=320,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=4096,
    config={},
)
LAYERS = Layers(ids=(1, 2), convention="output")


def test_a_supported_model_passes() -> None:
    check(LLAMA, LAYERS, "bfloat16", Engine(tensor_parallel_size=3))


@pytest.mark.parametrize(
    ("checkpoint", "layers", "engine", "message"),
    [
        (replace(LLAMA, architecture="KimiK3ForCausalLM"), LAYERS, {}, "KimiK3ForCausalLM .* was not checked"),
        (LLAMA, Layers(ids=(6,), convention="output"), {}, r"\[6\] lie above the model"),
        (
            replace(LLAMA, architecture="DeepseekV3ForCausalLM"),
            Layers(ids=(0, 3), convention="input"),
            {},
            "depth 0 .* cannot be captured from DeepseekV3ForCausalLM",
        ),
        (LLAMA, LAYERS, {"tensor_parallel_size": 2}, r"does not divide the 9 attention heads .* \[1, 3, 9\]"),
        (
            replace(LLAMA, num_attention_heads=12),
            LAYERS,
            {"tensor_parallel_size": 2},
            "3 key-value heads .* do not divide each other",
        ),
        (LLAMA, LAYERS, {"tensor_parallel_size": 3, "in_process": True}, "in_process runs one device only"),
        (LLAMA, LAYERS, {"max_model_len": 8192}, "above the model's 4096 positions"),
        (LLAMA, LAYERS, {"max_num_batched_tokens": 8}, "below engine.max_num_seqs"),
        (LLAMA, LAYERS, {"extra": {"max_model_len": 5}}, "use engine.max_model_len"),
        (LLAMA, LAYERS, {"extra": {"enable_prefix_caching": True}}, "rows of cached tokens are never computed"),
        (LLAMA, LAYERS, {"extra": {"pipeline_parallel_size": 2}}, "use tensor parallelism"),
        (LLAMA, LAYERS, {"extra": {"prefill_context_parallel_size": 2}}, "part of the tokens"),
        (LLAMA, LAYERS, {"extra": {"enable_dbo": True}}, "two half batches"),
        (LLAMA, LAYERS, {"extra": {"worker_cls": "x.Y"}}, "the capture is the worker class"),
        (LLAMA, LAYERS, {"extra": {"speculative_config": {}}}, "draft tokens"),
    ],
)
def test_what_cannot_work_is_refused(
    checkpoint: Checkpoint, layers: Layers, engine: dict[str, Any], message: str
) -> None:
    with pytest.raises(StartupError, match=message):
        check(checkpoint, layers, "bfloat16", Engine.model_validate(engine))


def test_harmless_values_of_refused_arguments_pass() -> None:
    check(LLAMA, LAYERS, "bfloat16", Engine(extra={"enable_prefix_caching": False, "pipeline_parallel_size": 1}))


@pytest.mark.parametrize("version", ["0.25.1", "0.32.0", "0.33.0+cpu"])
def test_versions_that_were_read_are_accepted(version: str) -> None:
    check_vllm(version)


@pytest.mark.parametrize("version", ["0.24.9", "0.34.0", "1.0.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(StartupError, match=r"checked with 0\.25 up to 0\.33 only"):
        check_vllm(version)
