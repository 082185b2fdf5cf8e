"""Whether the engine will fit into memory, found out before the minutes of loading; and sizes that were left open.

Sizes are estimates from the checkpoint's headers and the model's numbers, meant to be right within a few percent of
the weights; vLLM measures the rest itself. Nothing here makes a CUDA context: the flow's process must not hold one.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.extract.checks import StartupError
from tasks.extract.config import Engine
from tasks.model import Checkpoint
from tasks.vocabulary import DType

GIB = 2**30

#: What a process of the engine takes on the host beside everything that is counted here: Python, torch, CUDA.
PROCESS_BYTES = 2 * GIB
#: The CUDA context, NCCL's buffers and the workspaces of kernels, on each GPU.
CONTEXT_BYTES = 2 * GIB

STEP_TOKENS = (16_384, 8_192, 4_096, 2_048)
"""Sizes of a step to choose from. Prefill gains nothing beyond the first; vLLM's own steps are about as large."""
CPU_STEP_TOKENS = 8_192
CPU_CACHE_STEPS = 2
"""A CPU's KV cache holds the tokens of so many steps, where no size is given; prefill needs no more than those."""
CPU_BLOCK_TOKENS = 128
"""Of vLLM's KV cache on a CPU, at most."""
STEP_BYTES = GIB
"""Captured states of a step may take so much: on the GPU until they are copied, and once per slot on the host."""
STEP_SHARE = 32
"""... and at most the GPU's memory over this."""
RING_SLOTS = 3
"""One step is copied, one is assembled, and one is free for the engine."""
RING_SHARE = 4
"""Rings of more than the free host memory over this are made one slot shorter."""

#: Parts of weights' names by what tensor parallelism does with them in vLLM: every rank holds these whole.
REPLICATED = ("norm", ".q_a_proj.", ".kv_a_proj", ".mlp.gate.", "bias")
NOT_LOADED = ("vision_tower.", "mm_projector.")

_ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2}
_DTYPE_BYTES = {"bfloat16": 2, "float32": 4}


@dataclass(frozen=True)
class Gpu:
    """A GPU that the engine would use."""

    free: int
    total: int
    capability: tuple[int, int]


@dataclass(frozen=True)
class Machine:
    """What there is to run on; memory in bytes."""

    host_free: int
    gpus: tuple[Gpu, ...] = ()
    """Empty on a CPU."""
    nvlink: bool = True
    """Whether every two of the GPUs are joined by NVLink."""

    @property
    def on_cpu(self) -> bool:
        return not self.gpus


@dataclass(frozen=True)
class Need:
    """Bytes that one rank needs, by what for."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    def __str__(self) -> str:
        return ", ".join(f"{what} {size / GIB:.1f}" for what, size in self.parts.items())


def look(num_gpus: int) -> Machine:
    """This machine; of its GPUs the first ``num_gpus`` that CUDA would show.

    Raises:
        StartupError: there are fewer GPUs than that.
    """
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Machine(host_free())
    if not current_platform.is_cuda():
        raise StartupError(f"the capture runs on CUDA GPUs and on CPUs, not on {current_platform.device_name}")
    from vllm.utils.import_utils import import_pynvml

    nvml = import_pynvml()
    nvml.nvmlInit()
    try:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = [str(i) for i in range(nvml.nvmlDeviceGetCount())] if visible is None else visible.split(",")
        names = [name.strip() for name in names if name.strip()]
        if len(names) < num_gpus:
            raise StartupError(
                f"engine.tensor_parallel_size is {num_gpus}, but {len(names)} GPUs are visible; lower it, or check "
                "CUDA_VISIBLE_DEVICES"
            )
        gpus, indices = [], []
        for name in names[:num_gpus]:
            handle = (
                nvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else nvml.nvmlDeviceGetHandleByUUID(name.encode())
            )
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
            capability = nvml.nvmlDeviceGetCudaComputeCapability(handle)
            indices.append(int(nvml.nvmlDeviceGetIndex(handle)))
            gpus.append(Gpu(int(memory.free), int(memory.total), (int(capability[0]), int(capability[1]))))
    finally:
        nvml.nvmlShutdown()
    return Machine(host_free(), tuple(gpus), num_gpus == 1 or bool(current_platform.is_fully_connected(indices)))


def host_free(root: Path = Path("/")) -> int:
    """Bytes of host memory that this process may still use, by /proc/meminfo and the limits of its control groups.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    meminfo = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in meminfo if line.startswith("MemAvailable:"))
    for limit, used in _control_groups(root):
        free = min(free, max(0, limit - used))
    return free


def _control_groups(root: Path) -> list[tuple[int, int]]:
    """Limit and use, in bytes, of each control group around this process that has a limit."""
    found = []
    base = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers not in ("", "memory"):
            continue
        old = controllers == "memory"  # the first version of control groups
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if old else ("memory.max", "memory.current")
        top = base / "memory" if old else base
        group = top / path.lstrip("/")
        # A container may see its own group as the root of the hierarchy.
        for directory in [group, *group.parents]:
            if not directory.is_relative_to(top):
                break
            try:
                limit, used = ((directory / name).read_text(encoding="ascii").strip() for name in names)
                reclaimable = _inactive_files(directory / "memory.stat")
            except OSError:
                continue
            if limit != "max" and int(limit) < 2**60:
                found.append((int(limit), max(0, int(used) - reclaimable)))
    return found


def _inactive_files(path: Path) -> int:
    """Bytes of cached files that a control group gives up first when it runs short."""
    values = dict(line.split() for line in path.read_text(encoding="ascii").splitlines())
    return int(values.get("total_inactive_file", values.get("inactive_file", 0)))


def weight_bytes(checkpoint: Checkpoint, dtype: DType, ranks: int) -> int | None:
    """Bytes of weights on each rank, from the headers of the checkpoint's safetensors files; None if it has none.

    Plain floating-point weights are loaded in ``dtype``; packed ones as they are.
    """
    text = checkpoint.config.get("text_config", checkpoint.config)
    quantized = "quantization_config" in text or "quantization_config" in checkpoint.config
    multimodal = "vision_config" in checkpoint.config
    total = 0.0
    paths = sorted(checkpoint.path.glob("*.safetensors"))
    for path in paths:
        for name, tensor in _header(path).items():
            if multimodal and any(part in name for part in NOT_LOADED):
                continue
            start, stop = tensor["data_offsets"]
            size = stop - start
            if tensor["dtype"] in ("F32", "F16", "BF16") and not (quantized and "_scale" in name):
                size = size // _ITEM_BYTES[tensor["dtype"]] * _DTYPE_BYTES[dtype]
            total += size / _share(name, checkpoint, ranks)
    if not paths:
        files = [p.stat().st_size for p in checkpoint.path.iterdir() if p.suffix in {".bin", ".pt", ".pth"}]
        return sum(files) // ranks if files else None
    return int(total)


def _share(name: str, checkpoint: Checkpoint, ranks: int) -> int:
    """Over how many ranks a weight is split."""
    if any(part in name for part in REPLICATED):
        return 1
    if ".k_proj." in name or ".v_proj." in name:
        return min(ranks, checkpoint.num_key_value_heads)
    return ranks


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return dict(header)


def kv_bytes(checkpoint: Checkpoint, dtype: DType, engine: Engine) -> int:
    """Bytes of the KV cache per token on each rank; the latent of MLA is on every rank whole."""
    text = checkpoint.config.get("text_config", checkpoint.config)
    item = 1 if engine.kv_cache_dtype.startswith("fp8") else _DTYPE_BYTES[dtype]
    if text.get("kv_lora_rank"):
        return int(checkpoint.num_layers * (text["kv_lora_rank"] + text["qk_rope_head_dim"]) * item)
    head = text.get("head_dim") or checkpoint.hidden_size // checkpoint.num_attention_heads
    heads = max(1, checkpoint.num_key_value_heads // engine.tensor_parallel_size)
    return int(checkpoint.num_layers * 2 * heads * head * item)


def activation_bytes(checkpoint: Checkpoint, dtype: DType, ranks: int) -> int:
    """Bytes per token of a step that the model's own forward takes at its widest, about."""
    text = checkpoint.config.get("text_config", checkpoint.config)
    hidden = checkpoint.hidden_size
    wide = 3 * text.get("intermediate_size", 4 * hidden) // ranks
    if text.get("n_routed_experts"):
        chosen = text["num_experts_per_tok"]
        wide = max(wide, chosen * (hidden + 3 * text["moe_intermediate_size"] // ranks))
    if text.get("kv_lora_rank"):
        head = text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]
    else:
        head = 3 * (text.get("head_dim") or hidden // checkpoint.num_attention_heads)
    attention = 2 * head * checkpoint.num_attention_heads // ranks
    return int(_DTYPE_BYTES[dtype] * (6 * hidden + max(wide, attention)))


def state_bytes(checkpoint: Checkpoint, depths: Sequence[int], dtype: DType) -> int:
    """Bytes of the captured states of one token."""
    return len(depths) * checkpoint.hidden_size * _DTYPE_BYTES[dtype]


def fitted(
    checkpoint: Checkpoint,
    depths: Sequence[int],
    dtype: DType,
    engine: Engine,
    machine: Machine,
    *,
    reuse: bool = False,
) -> Engine:
    """The engine's settings with those filled in that were left open, shown to fit into the machine's memory.

    Args:
        checkpoint: the model.
        depths: of the states.
        dtype: of the states.
        engine: what is asked for.
        machine: what there is.
        reuse: whether rows of shared prefixes are held in host memory.

    Raises:
        StartupError: they do not fit; says what to change.
    """
    per_token = state_bytes(checkpoint, depths, dtype)
    ranks = writing_ranks(engine, machine)
    asked = engine.max_num_batched_tokens
    sizes = [asked] if asked is not None else _step_sizes(per_token, engine, machine)
    for tokens in sizes:
        slots = engine.ring_slots
        if slots is None:
            rings = RING_SLOTS * tokens * per_token * (1 if ranks == "first" else engine.tensor_parallel_size)
            slots = RING_SLOTS if rings <= machine.host_free // RING_SHARE else RING_SLOTS - 1
        changes: dict[str, Any] = {"writing_ranks": ranks, "max_num_batched_tokens": tokens, "ring_slots": slots}
        if machine.on_cpu and engine.kv_cache_gib is None:
            # vLLM would take nine tenths of all memory, and not start where other programs have more than the rest.
            held = max(engine.max_model_len, CPU_CACHE_STEPS * tokens) + CPU_BLOCK_TOKENS
            changes["kv_cache_gib"] = held * kv_bytes(checkpoint, dtype, engine) / GIB
        chosen = engine.model_copy(update=changes)
        try:
            _check_gpus(checkpoint, per_token, dtype, chosen, machine)
            _check_host(checkpoint, per_token, dtype, chosen, machine, reuse)
        except StartupError:
            if tokens == sizes[-1]:
                raise
        else:
            break
    return chosen


def writing_ranks(engine: Engine, machine: Machine) -> str:
    """``first`` or ``all``, where ``auto`` was asked for.

    On GPUs one process cannot encode what two GPUs compute: with rank 0 alone extraction ran at 0.45 of prefill, with
    samples dealt over the ranks at 0.97. The ranks of a CPU share its cores, and one encodes as fast as two.
    """
    if engine.writing_ranks != "auto":
        return engine.writing_ranks
    return "first" if machine.on_cpu or engine.tensor_parallel_size == 1 else "all"


def _step_sizes(per_token: int, engine: Engine, machine: Machine) -> list[int]:
    """Tokens of a step to try, the largest first."""
    limit = min(STEP_BYTES, (machine.host_free if machine.on_cpu else machine.gpus[0].total) // STEP_SHARE)
    sizes = [n for n in STEP_TOKENS if n <= (CPU_STEP_TOKENS if machine.on_cpu else STEP_TOKENS[0])]
    fitting = [tokens for tokens in sizes if tokens * per_token <= limit] or sizes[-1:]
    return [max(tokens, engine.max_num_seqs) for tokens in fitting]


def _step_need(checkpoint: Checkpoint, per_token: int, dtype: DType, engine: Engine) -> dict[str, int]:
    tokens, slots = engine.max_num_batched_tokens or 0, engine.ring_slots or 0
    ranks = engine.tensor_parallel_size
    return {
        "activations of a step": tokens * activation_bytes(checkpoint, dtype, ranks),
        "captured states": tokens * per_token,
        # Where samples are dealt over the ranks, one rank may have to keep all of a step.
        "states on their way to the host": tokens * per_token * slots,
    }


def _check_gpus(checkpoint: Checkpoint, per_token: int, dtype: DType, engine: Engine, machine: Machine) -> None:
    weights = weight_bytes(checkpoint, dtype, engine.tensor_parallel_size) or 0
    longest = engine.max_model_len * kv_bytes(checkpoint, dtype, engine)
    asked = None if engine.kv_cache_gib is None else int(engine.kv_cache_gib * GIB)
    if not machine.on_cpu and asked is not None and asked < longest:
        raise StartupError(
            f"engine.kv_cache_gib {engine.kv_cache_gib} does not hold one sample of {engine.max_model_len} tokens, "
            f"which takes {longest / GIB:.2f} GiB; raise it or lower engine.max_model_len"
        )
    utilization = f"engine.gpu_memory_utilization {engine.gpu_memory_utilization}"
    need = Need(
        {"weights": weights, "KV cache": longest if asked is None else asked, "CUDA and NCCL": CONTEXT_BYTES}
        | _step_need(checkpoint, per_token, dtype, engine)
    )
    for index, gpu in enumerate(machine.gpus):
        if need.total > gpu.free:
            raise StartupError(
                f"GPU {index} has {gpu.free / GIB:.1f} of {gpu.total / GIB:.1f} GiB free, but the engine needs about "
                f"{need.total / GIB:.1f} on each: {need}. {_advice(need, gpu, engine)}"
            )
        # Within its share of the memory vLLM puts weights, a step's activations with what the model hands out, and the
        # KV cache, which is as large as it can be unless its size is given; states that are being copied come on top.
        share, leaving = int(gpu.total * engine.gpu_memory_utilization), need.parts["states on their way to the host"]
        free, total = f"{gpu.free / GIB:.1f}", f"{gpu.total / GIB:.1f}"
        if share > gpu.free:
            raise StartupError(
                f"{utilization} asks for {share / GIB:.1f} GiB of GPU {index}, which has {free} free of {total}; end "
                f"what else runs there, or lower it to {gpu.free / gpu.total:.2f} or less"
            )
        if asked is None and need.total - leaving > share:
            raise StartupError(
                f"{utilization} gives vLLM {share / GIB:.1f} GiB of GPU {index}, but it needs about "
                f"{(need.total - leaving) / GIB:.1f}: {need}. Raise it, or: {_advice(need, gpu, engine)}"
            )
        if asked is None and share + leaving > gpu.free:
            raise StartupError(
                f"{utilization} leaves {(gpu.free - share) / GIB:.1f} GiB of GPU {index}, but states on their "
                f"way to the host take {leaving / GIB:.1f}; lower it to "
                f"{max(0.0, (gpu.free - leaving) / gpu.total):.2f}, or lower engine.max_num_batched_tokens"
            )


def _advice(need: Need, gpu: Gpu, engine: Engine) -> str:
    """What to change, of what can be changed the largest."""
    if need.parts["weights"] + need.parts["CUDA and NCCL"] > 0.9 * gpu.free:
        return (
            f"Most of it is weights: raise engine.tensor_parallel_size (now {engine.tensor_parallel_size}), or end "
            "what else uses the memory"
        )
    parts = ("activations of a step", "captured states", "states on their way to the host")
    if sum(need.parts[part] for part in parts) >= need.parts["KV cache"]:
        return f"Lower engine.max_num_batched_tokens (now {engine.max_num_batched_tokens})"
    return f"Lower engine.max_model_len (now {engine.max_model_len}) or engine.kv_cache_gib"


def _check_host(
    checkpoint: Checkpoint, per_token: int, dtype: DType, engine: Engine, machine: Machine, reuse: bool
) -> None:
    ranks, tokens, slots = engine.tensor_parallel_size, engine.max_num_batched_tokens or 0, engine.ring_slots or 0
    staging = int(engine.staging_gib * GIB)
    parts = {"captured samples (engine.staging_gib)": staging}
    if reuse:
        parts["rows of shared prefixes (engine.reuse_gib)"] = int(engine.reuse_gib * GIB)
    if machine.on_cpu:
        weights = (weight_bytes(checkpoint, dtype, ranks) or 0) * ranks
        cache = (engine.kv_cache_gib or 0) * GIB * ranks
        parts |= {"weights": weights, "KV cache (engine.kv_cache_gib)": int(cache)}
    if not machine.on_cpu or engine.writer_process:
        writers = ranks if engine.writing_ranks == "all" else 1
        parts["rings (engine.ring_slots steps)"] = writers * slots * tokens * per_token
    if not machine.on_cpu:
        parts["processes"] = (1 + ranks) * PROCESS_BYTES
    need = Need(parts)
    if need.total > machine.host_free:
        changes = {
            "captured samples (engine.staging_gib)": "lower engine.staging_gib",
            "KV cache (engine.kv_cache_gib)": "lower engine.kv_cache_gib",
            "rows of shared prefixes (engine.reuse_gib)": "lower engine.reuse_gib",
            "rings (engine.ring_slots steps)": "lower engine.ring_slots or engine.max_num_batched_tokens",
        }
        fixed = sum(size for what, size in parts.items() if what not in changes)
        change = changes[max(changes, key=lambda what: parts.get(what, 0))]
        if fixed > 0.9 * machine.host_free:
            change = "use a machine with more memory"
        raise StartupError(
            f"{machine.host_free / GIB:.1f} GiB of host memory are free (with the limits of the container), but the "
            f"engine needs about {need.total / GIB:.1f}: {need}; {change}"
        )
