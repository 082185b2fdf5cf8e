"""What cannot work is refused before anything is loaded, and the message says what to change."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flows.config import Extraction
from tasks.extract.checks import StartupError, check, check_gpus, check_vllm
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


KIMI = replace(
    LLAMA,
    architecture="KimiK25ForConditionalGeneration",
    config={"text_config": {"kv_lora_rank": 512, "n_routed_experts": 384, "quantization_config": {}}},
)


def on(capability: tuple[int, int], *, nvlink: bool = False, **engine: Any) -> list[str]:
    extra = {"attention_backend": "TRITON_MLA", "moe_backend": "marlin"} | engine.pop("extra", {})
    return check_gpus(KIMI, Engine.model_validate(engine | {"extra": extra}), capability, nvlink=nvlink)


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)])
def test_what_was_reported_to_work_passes(capability: tuple[int, int]) -> None:
    assert on(capability) == []


@pytest.mark.parametrize(
    ("capability", "backend", "where"),
    [
        ((12, 0), "FLASH_ATTN_MLA", "only on 9.x"),
        ((12, 0), "FLASHMLA", "only on 9.x and 10.x"),
        ((12, 0), "CUTLASS_MLA", "only on 10.x"),
        ((12, 1), "FLASHINFER_MLA", "only on 10.x"),
        ((9, 0), "CUTLASS_MLA", "only on 10.x"),
        ((10, 0), "flash_attn_mla", "only on 9.x"),
    ],
)
def test_attention_that_does_not_run_is_refused(capability: tuple[int, int], backend: str, where: str) -> None:
    with pytest.raises(StartupError, match=f"does not run on .* {capability[0]}.{capability[1]}, {where}; use TRITON"):
        on(capability, extra={"attention_backend": backend})
    with pytest.raises(StartupError, match=where):
        on(capability, extra={"attention_backend": None, "attention_config": {"backend": backend}})


@pytest.mark.parametrize(
    ("engine", "nvlink", "warning"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, False, "garbled text"),
        ({"extra": {"moe_backend": "auto"}}, False, "vLLM's own choice of kernels for packed experts"),
        ({"extra": {"moe_backend": "cutlass"}}, False, "moe_backend cutlass .*garbage or NaN"),
        ({"extra": {"enable_expert_parallel": True}}, False, "10 to 20 times slower"),
        ({"extra": {"enable_expert_parallel": True}}, True, None),
    ],
)
def test_what_was_reported_to_go_wrong_is_warned_of(engine: dict[str, Any], nvlink: bool, warning: str | None) -> None:
    found = on((12, 0), nvlink=nvlink, **engine)
    assert len(found) == (warning is not None)
    if warning is not None:
        assert re.search(warning, found[0])


def test_the_preset_fits_the_gpus_that_it_is_for() -> None:
    kimi = Extraction.load("kimi-k25").engine
    assert check_gpus(KIMI, kimi, (12, 0), nvlink=False) == []
    check(
        replace(KIMI, num_layers=61, num_attention_heads=64, num_key_value_heads=64, max_position_embeddings=262144),
        LAYERS,
        "bfloat16",
        kimi,
    )
