"""What the verification costs: capture with digests, witness, gather and judgement beside capture without, in turn.

    python -m infra.bench.verify --size 2                        # Kimi-shaped, dummy weights, on GPUs
    python -m infra.bench.verify --model DIR --dtype float32 --ids 2 14 26 29 --prompts 6 --longest 256   # on a CPU

One engine and one run. Both turns capture, copy to host memory and assemble; nothing is written to a disk, which
would hide the difference. The turn with verification ends when the last sample was judged. Prints one JSON object.
"""

import argparse
import json
import os
import pickle
import platform
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infra.bench.extract import BenchEngine, kimi_shaped, prompts
from tasks.extract import engine as engine_module
from tasks.extract.config import Engine
from tasks.extract.engine import EngineSpec, Job
from tasks.layers import Layers
from tasks.model import read
from tasks.verify.config import Audit
from tasks.verify.judge import Case, judge
from tasks.vocabulary import PlannedSample, digest_ids


def drop(
    _directory: Path,
    _key: str,
    _spec: Mapping[str, Any],
    _states_LTH: npt.NDArray[Any],
    _ids: npt.NDArray[np.int32],
    _executor: Any,
) -> dict[str, tuple[int, int]]:
    """Stage nothing."""
    return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; Kimi-shaped with dummy weights when absent")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ids", type=int, nargs="+", default=[2, 7, 11, 15], help="layers, by output")
    parser.add_argument("--size", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--shortest", type=int, default=128)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--kv-gib", type=float)
    args = parser.parse_args()

    checkpoint = read(args.model) if args.model else kimi_shaped(args.layers, args.experts)
    layers = Layers(ids=tuple(args.ids), convention="output")
    layers.check(checkpoint.num_layers)
    worker = "infra.bench.bench_worker." + ("Gpu" if torch.cuda.is_available() else "Cpu")
    engine_module.WORKERS.update(cpu=worker, gpu=worker)
    engine = Engine(
        tensor_parallel_size=args.size,
        max_model_len=args.longest + 1,
        max_num_batched_tokens=args.batched_tokens,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.kv_gib,
        load_format="auto" if args.model else "dummy",
    )
    identity = checkpoint.identity(layers, args.dtype)
    ratios, judged, shares, receipt_bytes, refused = [], [], [], 0, []
    spec = EngineSpec(checkpoint, layers.depths, args.dtype, engine, "infra.bench.verify:drop", {})
    running = BenchEngine(spec).start()
    try:
        for turn in range(-1, args.rounds):  # the first turn warms kernels up and does not count
            batch = prompts(args.prompts, args.shortest, args.longest, checkpoint.vocab_size, turn + 1)
            samples = {identity.key(ids): ids for ids in batch}
            seconds = {}
            # The order alternates, so that neither always runs on the warmer machine.
            for verified in (True, False) if turn % 2 else (False, True):
                running.rpc("bench_verify", verified)
                running.rpc("bench_verify_seconds")
                began = time.perf_counter()
                with tempfile.TemporaryDirectory() as directory:
                    receipts = running.submit(Job(Path(directory), samples)).result()
                computed = time.perf_counter()
                if verified:
                    for key, ids in samples.items():
                        planned = PlannedSample(key, len(ids), (0,))
                        verdict = judge(Case(identity, planned, digest_ids(ids), args.size, receipts[key], Audit()))
                        if not verdict.accepted:
                            refused.append(f"{verdict.reason}: {verdict.detail}")
                    judged.append(time.perf_counter() - computed)
                    spent = max(running.rpc("bench_verify_seconds")) + judged[-1]
                    shares.append(spent / (time.perf_counter() - began))
                    receipt_bytes = max(len(pickle.dumps(r)) for of_key in receipts.values() for r in of_key)
                seconds[verified] = time.perf_counter() - began
            tokens = sum(map(len, batch))
            print(
                f"turn {turn}: {tokens} tokens, without {seconds[False]:.3f} s, with {seconds[True]:.3f} s", flush=True
            )
            if turn >= 0:
                ratios.append(seconds[False] / seconds[True])
        device = running.ranks[0]["device"]
    finally:
        running.shutdown()
    result = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "device": device,
        "size": args.size,
        "throughput_with_over_without": [round(r, 4) for r in ratios],
        "median": round(float(np.median(ratios)), 4),
        # Of one turn's own time, so that a busy machine does not matter; on a GPU the kernels run beside.
        "share_of_time": round(float(np.median(shares)), 4),
        "judge_s_per_turn": round(float(np.median(judged)), 4),
        "largest_receipt_bytes": receipt_bytes,
        "refused": refused[:5],
    }
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
