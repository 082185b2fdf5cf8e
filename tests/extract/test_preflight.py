"""What cannot fit is refused before it is loaded, on machines of scripted memory."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tasks.extract.assembly import AssemblySpec, CaptureSettings
from tasks.extract.assembly_process import slot_bytes
from tasks.extract.checks import StartupError
from tasks.extract.config import Engine
from tasks.extract.preflight import (
    GIB,
    Gpu,
    Machine,
    activation_bytes,
    fitted,
    host_free,
    kv_bytes,
    look,
    state_bytes,
    weight_bytes,
    writing_ranks,
)
from tasks.model import Checkpoint

#: Kimi-K2.5's numbers.
KIMI_TEXT: dict[str, Any] = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 384,
    "num_experts_per_tok": 8,
    "quantization_config": {"quant_method": "compressed-tensors"},
}
KIMI = Checkpoint(
    path=Path("nowhere"),
    fingerprint="hub:x",
    architecture="KimiK25ForConditionalGeneration",
    num_layers=61,
    hidden_size=7168,
    vocab_size=163840,
    num_attention_heads=64,
    num_key_value_heads=64,
    max_position_embeddings=262144,
    config={"text_config": KIMI_TEXT, "vision_config": {}},
)
DEPTHS = (3, 31, 59, 61)
BLACKWELL = Gpu(free=int(94.5 * GIB), total=int(95.6 * GIB), capability=(12, 0))
HOST = Machine(512 * GIB, (BLACKWELL,) * 8, nvlink=False)
EIGHT = Engine(tensor_parallel_size=8, max_model_len=32768, kv_cache_gib=4, staging_gib=32)


@pytest.fixture
def kimi(monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """Kimi-K2.5 with 595 GB of weights, all of them split."""
    monkeypatch.setattr("tasks.extract.preflight.weight_bytes", lambda checkpoint, dtype, ranks: 595 * 10**9 // ranks)
    return KIMI


def test_the_figures_of_the_first_target() -> None:
    assert kv_bytes(KIMI, "bfloat16", EIGHT) == 61 * (512 + 64) * 2 == 70_272
    assert state_bytes(KIMI, DEPTHS, "bfloat16") == 4 * 7168 * 2 == 57_344
    assert kv_bytes(KIMI, "bfloat16", EIGHT.model_copy(update={"kv_cache_dtype": "fp8_e4m3"})) == 35_136
    # The widest point of a layer is its experts: 8 chosen ones a token, each with its part of the width.
    assert activation_bytes(KIMI, "bfloat16", 8) == 2 * (6 * 7168 + 8 * (7168 + 3 * 2048 // 8))


def test_sizes_that_are_left_open_are_chosen(kimi: Checkpoint) -> None:
    engine = fitted(kimi, DEPTHS, "bfloat16", EIGHT, HOST)
    assert (engine.max_num_batched_tokens, engine.ring_slots, engine.writing_ranks) == (16_384, 3, "all")
    # 8 depths would make 1.9 GB of a step: it is cut, so that no more is on its way than with 4.
    engine = fitted(kimi, tuple(range(50, 58)), "bfloat16", EIGHT, HOST)
    assert engine.max_num_batched_tokens == 8_192
    # Rings of all ranks with 3 slots would take 22.5 GB, which is more than a fourth of this host's memory.
    engine = fitted(kimi, DEPTHS, "bfloat16", EIGHT, replace(HOST, host_free=80 * GIB))
    assert engine.ring_slots == 2


def test_a_step_is_made_as_small_as_the_gpu_wants_it(kimi: Checkpoint) -> None:
    """With 16384 tokens, activations and states would take 6 GiB beside weights and cache; half of it fits."""
    tight = replace(HOST, gpus=(replace(BLACKWELL, free=81 * GIB),) * 8)
    asked = EIGHT.model_copy(update={"gpu_memory_utilization": 0.8})
    assert fitted(kimi, DEPTHS, "bfloat16", asked, tight).max_num_batched_tokens == 8_192
    with pytest.raises(StartupError, match="max_num_batched_tokens"):
        fitted(kimi, DEPTHS, "bfloat16", asked.model_copy(update={"max_num_batched_tokens": 16_384}), tight)


def test_what_was_asked_for_is_kept(kimi: Checkpoint) -> None:
    asked = EIGHT.model_copy(update={"max_num_batched_tokens": 4096, "ring_slots": 5, "writing_ranks": "first"})
    assert fitted(kimi, DEPTHS, "bfloat16", asked, HOST) == asked


@pytest.mark.parametrize(
    ("asked", "size", "on_cpu", "chosen"),
    [
        ("auto", 8, False, "all"),
        ("auto", 1, False, "first"),
        ("auto", 2, True, "first"),
        ("first", 8, False, "first"),
        ("all", 2, True, "all"),
    ],
)
def test_samples_are_dealt_over_the_ranks_on_gpus(asked: Any, size: int, on_cpu: bool, chosen: str) -> None:
    machine = Machine(GIB, () if on_cpu else (BLACKWELL,) * size)
    assert writing_ranks(Engine(tensor_parallel_size=size, writing_ranks=asked), machine) == chosen


def few(gpu: Gpu) -> Machine:
    return replace(HOST, gpus=(BLACKWELL,) * 7 + (gpu,))


@pytest.mark.parametrize(
    ("change", "machine", "message"),
    [
        ({"tensor_parallel_size": 4}, replace(HOST, gpus=(BLACKWELL,) * 4), r"weights 138\.5.*raise .*parallel_size"),
        ({}, few(replace(BLACKWELL, free=70 * GIB)), r"GPU 7 has 70\.0 of 95\.6 GiB free, but the engine needs about"),
        ({"gpu_memory_utilization": 0.99}, HOST, r"asks for 94\.6 GiB of GPU 0, which has 94\.5 free .* to 0\.99"),
        ({"kv_cache_gib": None, "gpu_memory_utilization": 0.75}, HOST, r"gives vLLM 71\.7 GiB .* Raise it, or: Lower"),
        (
            {"kv_cache_gib": None, "gpu_memory_utilization": 0.98},
            HOST,
            r"leaves 0\.8 GiB of GPU 0, but states .* 0\.96",
        ),
        ({"kv_cache_gib": 2, "max_model_len": 65536}, HOST, r"kv_cache_gib 2 does not hold one sample of 65536 tok"),
        ({"max_num_batched_tokens": 65536}, HOST, r"Lower engine\.max_num_batched_tokens \(now 65536\)"),
        ({"kv_cache_gib": 85}, HOST, r"Lower engine\.max_model_len"),
        ({"staging_gib": 500}, HOST, r"512\.0 GiB of host memory are free .*; lower engine\.staging_gib"),
        ({"ring_slots": 80}, HOST, r"states on their way to the host 70\.0"),
        ({"ring_slots": 8, "staging_gib": 8}, replace(HOST, host_free=70 * GIB), r"; lower engine\.ring_slots"),
        ({"staging_gib": 1}, replace(HOST, host_free=21 * GIB), r"; lower engine\.ring_slots or engine\.max_num"),
        (
            {"staging_gib": 1, "writing_ranks": "first"},
            replace(HOST, host_free=16 * GIB),
            r"processes 18\.0; use a machine with more memory",
        ),
    ],
)
def test_what_does_not_fit_is_refused(kimi: Checkpoint, change: dict[str, Any], machine: Machine, message: str) -> None:
    with pytest.raises(StartupError, match=message):
        fitted(kimi, DEPTHS, "bfloat16", EIGHT.model_copy(update={"max_num_batched_tokens": 16_384} | change), machine)


@pytest.mark.parametrize(
    ("free", "message"),
    [(6, r"weights 4\.0, KV cache .* 2\.0; lower engine\.kv_cache_gib"), (7, None)],
)
def test_a_cpu_holds_weights_cache_and_staging(
    monkeypatch: pytest.MonkeyPatch, free: float, message: str | None
) -> None:
    monkeypatch.setattr("tasks.extract.preflight.weight_bytes", lambda checkpoint, dtype, ranks: 4 * GIB // ranks)
    engine = Engine(tensor_parallel_size=2, kv_cache_gib=1, staging_gib=0.5)
    checkpoint = replace(KIMI, hidden_size=256)
    if message is None:
        ready = fitted(checkpoint, DEPTHS, "float32", engine, Machine(free * GIB))  # type: ignore[arg-type]
        assert (ready.max_num_batched_tokens, ready.writing_ranks) == (8192, "first")
    else:
        with pytest.raises(StartupError, match=message):
            fitted(checkpoint, DEPTHS, "float32", engine, Machine(free * GIB))  # type: ignore[arg-type]


@pytest.mark.parametrize(("longest", "held"), [(1_000, 2 * 8192), (30_000, 30_000)])
def test_a_cpu_s_cache_is_as_large_as_it_must_be(kimi: Checkpoint, longest: int, held: int) -> None:
    """vLLM's own choice, nine tenths of all memory, fails where other programs have more than the rest."""
    engine = Engine(max_model_len=longest, staging_gib=0.5)
    ready = fitted(replace(kimi, hidden_size=256), DEPTHS, "float32", engine, Machine(1000 * GIB))
    assert ready.kv_cache_gib == (held + 128) * 61 * 576 * 4 / GIB


def test_weights_are_read_from_the_headers(tmp_path: Path) -> None:
    half, whole = torch.bfloat16, torch.int32
    save_file(
        {
            "language_model.lm_head.weight": torch.zeros(64, 8, dtype=half),
            "language_model.model.norm.weight": torch.zeros(8, dtype=half),
            "language_model.model.layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(16, 8, dtype=half),
        },
        tmp_path / "model-00001-of-00002.safetensors",
    )
    save_file(
        {
            "language_model.model.layers.0.mlp.experts.0.up_proj.weight_packed": torch.zeros(32, 1, dtype=whole),
            "vision_tower.patch_embed.proj.weight": torch.zeros(999, dtype=half),
        },
        tmp_path / "model-00002-of-00002.safetensors",
    )
    checkpoint = replace(KIMI, path=tmp_path)
    replicated, split, packed = 8 + 16 * 8, 64 * 8, 32 * 4
    assert weight_bytes(checkpoint, "bfloat16", 1) == 2 * (replicated + split) + packed
    assert weight_bytes(checkpoint, "bfloat16", 4) == 2 * (replicated + split // 4) + packed // 4
    assert weight_bytes(checkpoint, "float32", 4) == 4 * (replicated + split // 4) + packed // 4


def test_key_value_heads_are_repeated_where_ranks_outnumber_them(tmp_path: Path) -> None:
    save_file({"model.layers.0.self_attn.k_proj.weight": torch.zeros(8, 4)}, tmp_path / "model.safetensors")
    checkpoint = replace(KIMI, path=tmp_path, num_key_value_heads=2, config={})
    assert weight_bytes(checkpoint, "float32", 4) == 8 * 4 * 4 // 2
    assert kv_bytes(checkpoint, "float32", Engine(tensor_parallel_size=4)) == 61 * 2 * 1 * (7168 // 64) * 4


def test_a_checkpoint_without_safetensors_counts_by_its_files(tmp_path: Path) -> None:
    assert weight_bytes(replace(KIMI, path=tmp_path), "bfloat16", 2) is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x" * 100)
    assert weight_bytes(replace(KIMI, path=tmp_path), "bfloat16", 2) == 50


def test_the_ring_is_counted_as_it_is_made() -> None:
    spec = AssemblySpec(0, 8, 4, 7168, "bfloat16", True, 16, CaptureSettings("", {}, "", 1, 1, 3, True, None, 0))
    counted = 16_384 * state_bytes(KIMI, DEPTHS, "bfloat16")
    assert counted <= slot_bytes(spec, 16_384) <= 1.01 * counted


MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def system(root: Path, cgroup: str, groups: dict[str, dict[str, str]]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text(MEMINFO)
    (root / "proc/self/cgroup").write_text(cgroup)
    for group, files in groups.items():
        directory = root / "sys/fs/cgroup" / group
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name).write_text(text)
    return root


def group(limit: str, used: int, cached: int = 0) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.current": f"{used}\n",
        "memory.stat": f"anon 5\ninactive_file {cached}\n",
    }


@pytest.mark.parametrize(
    ("cgroup", "groups", "free"),
    [
        ("0::/\n", {}, 800 * 1024),
        ("0::/a/b\n", {"a/b": group("max", 5), "a": group("500000", 100_000)}, 400_000),
        ("0::/a/b\n", {"a/b": group("300000", 100_000, 50_000), "a": group("500000", 100_000)}, 250_000),
        ("0::/../elsewhere\n", {"": group("200000", 150_000)}, 50_000),
        ("0::/a\n", {"a": group("100", 200)}, 0),
        (
            "5:cpu:/a\n4:memory:/a\n",
            {
                "memory/a": {
                    "memory.limit_in_bytes": "300000",
                    "memory.usage_in_bytes": "200000",
                    "memory.stat": "total_inactive_file 1000\n",
                },
                "memory": {
                    "memory.limit_in_bytes": "9223372036854771712",
                    "memory.usage_in_bytes": "1",
                    "memory.stat": "",
                },
            },
            101_000,
        ),
    ],
)
def test_the_limits_of_a_container_count(
    tmp_path: Path, cgroup: str, groups: dict[str, dict[str, str]], free: int
) -> None:
    assert host_free(system(tmp_path, cgroup, groups)) == free


def test_this_machine_has_memory() -> None:
    assert 0 < host_free() < 1 << 50


def test_configuration_is_plain() -> None:
    """The settings that were filled in can be kept in a store's provenance."""
    assert json.loads(Engine().model_dump_json())["max_num_batched_tokens"] is None


class Nvml:
    """NVML with three GPUs; the second is known by its UUID, too."""

    def __init__(self) -> None:
        self.open = 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        return 3

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> int:
        return {b"GPU-1": 1}[uuid]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(free=10 + handle, total=20 + handle)

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> list[int]:
        return [12, handle]


def pretend(monkeypatch: pytest.MonkeyPatch, kind: str, linked: bool = False) -> tuple[Nvml, list[list[int]]]:
    """A platform of vLLM's, and what it was asked of NVLink."""
    nvml, asked = Nvml(), []

    def is_fully_connected(indices: list[int]) -> bool:
        asked.append(indices)
        return linked

    platform = SimpleNamespace(
        is_cpu=lambda: kind == "cpu",
        is_cuda=lambda: kind == "cuda",
        is_fully_connected=is_fully_connected,
        device_name=kind,
    )
    for name, values in {
        "vllm": {},
        "vllm.platforms": {"current_platform": platform},
        "vllm.utils": {},
        "vllm.utils.import_utils": {"import_pynvml": lambda: nvml},
    }.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
    return nvml, asked


@pytest.mark.parametrize(
    ("visible", "indices"),
    [(None, [0, 1]), ("2,0", [2, 0]), ("GPU-1,2", [1, 2]), ("0, 1 ,2", [0, 1])],
)
def test_the_gpus_that_cuda_would_show_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, indices: list[int]
) -> None:
    nvml, asked = pretend(monkeypatch, "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine = look(2)
    assert machine.gpus == tuple(Gpu(10 + i, 20 + i, (12, i)) for i in indices)
    assert (machine.nvlink, machine.on_cpu, asked, nvml.open) == (False, False, [indices], 0)


def test_a_single_gpu_needs_no_nvlink(monkeypatch: pytest.MonkeyPatch) -> None:
    _, asked = pretend(monkeypatch, "cuda")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert look(1).nvlink
    assert asked == []


def test_too_few_gpus_are_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml, _ = pretend(monkeypatch, "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(StartupError, match=r"tensor_parallel_size is 2, but 1 GPUs are visible"):
        look(2)
    assert nvml.open == 0


def test_a_cpu_has_host_memory_only_and_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "cpu")
    assert look(1).on_cpu
    pretend(monkeypatch, "rocm")
    with pytest.raises(StartupError, match="not on rocm"):
        look(1)
