"""What the benchmarks of the store share."""

import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tasks.vocabulary import Identity


def print_machine() -> None:
    """One line that says where the figures are from."""
    model = platform.processor() or "unknown"
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0] if names else model
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("zarr", "numcodecs", "numpy", "obstore"))
    print(
        f"machine: {model}, {os.cpu_count()} CPUs, {platform.system()} {platform.release()}, "
        f"Python {platform.python_version()}, {versions}, load {os.getloadavg()[0]:.1f}"
    )


def alternate(contestants: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; they take turns, so that a busy machine hurts all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, action in contestants.items():
            start = time.perf_counter()
            action()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(slow: Sequence[float], fast: Sequence[float]) -> float:
    """Median over the rounds of slow / fast, each pair taken in one round."""
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


def bench_identity(hidden_size: int = 7168, **changes: object) -> Identity:
    values: dict[str, object] = {
        "model": "bench",
        "architecture": "bench",
        "num_layers": 61,
        "hidden_size": hidden_size,
        "depths": (3, 31, 59, 61),
        "convention": "output",
        "layer_ids": (2, 30, 58, 60),
        "dtype": "bfloat16",
    }
    return Identity(**{**values, **changes})  # type: ignore[arg-type]


def heavy_tailed(depths: int, num_tokens: int, hidden_size: int, seed: int = 0) -> npt.NDArray[np.uint16]:
    """[L, T, H] bits of bfloat16 whose channels differ in scale, as a residual stream's do."""
    random = np.random.default_rng(seed)
    scale_H = np.exp(random.standard_normal(hidden_size) * 0.6)
    scale_H[random.integers(0, hidden_size, 3)] *= 300
    values = random.standard_normal((depths, num_tokens, hidden_size), dtype=np.float32)
    values *= scale_H.astype(np.float32) * np.linspace(0.5, 4, depths, dtype=np.float32)[:, None, None]
    return (values.view(np.uint32) >> 16).astype(np.uint16)
