"""Extraction beside plain prefill, in turn, in one engine and one run.

    python -m infra.bench.extract --layers 16 --experts 64 --ids 2 7 11 15 --size 2 --store /tmp/bench

The model is Kimi-shaped (hidden 7168, MLA, MoE) with dummy weights, or any checkpoint (``--model``). Extraction means
all of it: capture, copy, digests on every rank and again on arrival, encoding, checksums, verification, and a durable
commit; its time ends when the last sample is durable. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tasks.extract import engine as engine_module
from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.extract.receipts import Inbox
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.store import StagedSample, Store
from tasks.store.stage import STAGE
from tasks.verify.config import Audit
from tasks.verify.judge import Case, judge
from tasks.vocabulary import Identity, PlannedSample, Receipt, digest_ids

KIMI: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 2.827,
    "n_group": 1,
    "topk_group": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "vocab_size": 163840,
    "rope_theta": 50000.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 65536,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "num_nextn_predict_layers": 0,
}


class PlainJob(Job):
    """Prompts to run without capturing anything."""


class BenchEngine(CaptureEngine):
    """Runs plain jobs too."""

    def _admit(self, vllm_engine: Any, job: Job, owner: dict[str, Job]) -> None:
        if not isinstance(job, PlainJob):
            super()._admit(vllm_engine, job, owner)
            return
        from vllm import SamplingParams

        for key, ids in job.samples.items():
            parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            vllm_engine.add_request(key, {"prompt_token_ids": ids.tolist()}, parameters)
            owner[key] = job

    def _collect(self, vllm_engine: Any, job: Job, *, idle: bool) -> bool:
        if not isinstance(job, PlainJob):
            return super()._collect(vllm_engine, job, idle=idle)
        job.receipts.set_result({})
        return True

    def _serve(self, vllm_engine: Any, active: list[Job], *, until_done: bool = False) -> None:
        self.vllm_engine = vllm_engine
        super()._serve(vllm_engine, active, until_done=until_done)

    def reopen(self, **changes: Any) -> None:
        """Go on with other settings of the capture; only while no job is under way."""
        self._inbox.expect_end()
        self.rpc("layertap_close")
        self._inbox.close()
        self._inbox = Inbox(self.spec.engine.tensor_parallel_size)
        self.rpc("layertap_open", asdict(replace(self._settings(), **changes)))
        self._inbox.accept()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Only while no job is under way."""
        return list(self.vllm_engine.collective_rpc(method, args=args))


def kimi_shaped(layers: int, experts: int) -> Checkpoint:
    """A checkpoint without weights; the engine makes them up."""
    directory = Path(tempfile.mkdtemp(prefix="kimi-shaped-"))
    config = KIMI | {"num_hidden_layers": layers, "n_routed_experts": experts}
    (directory / "config.json").write_text(json.dumps(config))
    return Checkpoint(
        path=directory,
        fingerprint=f"dummy:{layers}x{experts}",
        architecture="DeepseekV3ForCausalLM",
        num_layers=layers,
        hidden_size=7168,
        vocab_size=163840,
        num_attention_heads=64,
        num_key_value_heads=64,
        max_position_embeddings=65536,
        config=config,
    )


def prompts(count: int, shortest: int, longest: int, vocab_size: int, seed: int) -> list[npt.NDArray[np.int32]]:
    """Random prompts, no token twice in one: made-up weights give equal rows for equal tokens."""
    random = np.random.default_rng(seed)
    lengths = random.integers(shortest, longest + 1, size=count)
    return [random.permutation(vocab_size - 64)[:n].astype(np.int32) for n in lengths]


class Extractor:
    """The whole way of an extraction, without Prefect."""

    def __init__(self, engine: BenchEngine, store: Store, size: int, chunk_tokens: int) -> None:
        self.engine, self.store, self.size, self.chunk_tokens = engine, store, size, chunk_tokens
        self.spent = {"verify": 0.0, "commit": 0.0}
        self.stored_bytes = 0
        self.computed_at = 0.0
        """When the engine finished its last sample."""
        self.refused: list[str] = []

    def run(self, samples: list[npt.NDArray[np.int32]]) -> float:
        """Extract, verify and commit; returns the seconds until the last sample is durable."""
        began = time.perf_counter()
        with ThreadPoolExecutor(max_workers=4) as pool:
            done = []
            for chunk in self._chunks(samples):
                keyed = {self.store.identity.key(ids): ids for ids in chunk}
                receipts = self.engine.submit(Job(self.store.staging(), keyed, on_sample=self._computed))
                done.append(pool.submit(self._finish, keyed, receipts))
            for each in done:
                each.result()
        return time.perf_counter() - began

    def _computed(self, key: str, num_tokens: int) -> None:
        self.computed_at = time.perf_counter()

    def _chunks(self, samples: list[npt.NDArray[np.int32]]) -> list[list[npt.NDArray[np.int32]]]:
        chunks: list[list[npt.NDArray[np.int32]]] = [[]]
        for ids in samples:
            if chunks[-1] and sum(map(len, chunks[-1])) + len(ids) > self.chunk_tokens:
                chunks.append([])
            chunks[-1].append(ids)
        return chunks

    def _finish(self, samples: dict[str, npt.NDArray[np.int32]], future: Any) -> None:
        receipts: dict[str, list[Receipt]] = future.result()
        began = time.perf_counter()
        staged = []
        for key, ids in samples.items():
            planned = PlannedSample(key, len(ids), (0,))
            verdict = judge(
                Case(self.store.identity, planned, digest_ids(ids), self.size, receipts[key], Audit(max_zero_rows=0))
            )
            if not verdict.accepted:
                self.refused.append(f"{verdict.reason}: {verdict.detail}")
                continue
            receipt = next(r for r in receipts[key] if r.objects is not None)
            objects = receipt.objects or {}
            self.stored_bytes += sum(size for size, _ in objects.values())
            staged.append(StagedSample(key, len(ids), objects, np.ones(len(ids), bool), receipt.next_token))
        verified = time.perf_counter()
        self.store.commit(staged)
        self.store.record()
        self.spent["verify"] += verified - began
        self.spent["commit"] += time.perf_counter() - verified


def disk_speed(directory: Path, gib: float = 4.0) -> float:
    """Bytes/s of one thread writing and flushing incompressible data."""
    block = np.random.default_rng(0).bytes(64 << 20)
    path = directory / "speed"
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(int(gib * 16)):
            file.write(block)
        os.fsync(file.fileno())
    speed = path.stat().st_size / (time.perf_counter() - began)
    path.unlink()
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; Kimi-shaped with dummy weights when absent")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ids", type=int, nargs="+", default=[2, 7, 11, 15], help="layers, by output")
    parser.add_argument("--size", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--prompts", type=int, default=96)
    parser.add_argument("--shortest", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, default=65536)
    parser.add_argument("--writer-threads", type=int, default=12)
    parser.add_argument("--writing-ranks", choices=["first", "all"], default="first")
    parser.add_argument("--staging-gib", type=float, default=24)
    parser.add_argument("--ring-slots", type=int, default=3)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--keep", action="store_true", help="keep the stores")
    args = parser.parse_args()

    checkpoint = read(args.model) if args.model else kimi_shaped(args.layers, args.experts)
    layers = Layers(ids=tuple(args.ids), convention="output")
    layers.check(checkpoint.num_layers)
    worker = "infra.bench.bench_worker." + ("Gpu" if torch.cuda.is_available() else "Cpu")
    engine_module.WORKERS.update(cpu=worker, gpu=worker)
    engine = Engine(
        tensor_parallel_size=args.size,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.batched_tokens,
        max_num_seqs=64,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.kv_gib,
        load_format="auto" if args.model else "dummy",
        staging_gib=args.staging_gib,
        writer_threads=args.writer_threads,
        writing_ranks=args.writing_ranks,
        ring_slots=args.ring_slots,
    )
    identity = Identity(
        checkpoint.fingerprint,
        checkpoint.architecture,
        checkpoint.num_layers,
        checkpoint.hidden_size,
        layers.depths,
        "output",
        layers.ids,
        args.dtype,
    )
    state_bytes = len(layers.depths) * checkpoint.hidden_size * (2 if args.dtype == "bfloat16" else 4)
    root = Path(tempfile.mkdtemp(prefix="layertap-bench-", dir=args.store))
    speed = disk_speed(root)
    began = time.perf_counter()
    plain: list[float] = []
    full: list[float] = []
    result: dict[str, Any] = {}
    with Store.open(root / "store", identity, run="bench") as store:
        spec = EngineSpec(checkpoint, layers.depths, args.dtype, engine, STAGE, store.spec.to_dict())
        running = BenchEngine(spec).start()
        result["start_s"] = time.perf_counter() - began
        try:
            extractor = Extractor(running, store, args.size, args.chunk_tokens)
            for turn in range(-1, args.rounds):  # the first turn warms kernels up and does not count
                batch = prompts(args.prompts, args.shortest, args.longest, checkpoint.vocab_size, turn + 1)
                tokens = sum(map(len, batch))
                running.rpc("bench_pause", True)
                began = time.perf_counter()
                running.submit(PlainJob(root, {f"{i:064x}": ids for i, ids in enumerate(batch)})).result()
                plain_s = time.perf_counter() - began
                running.rpc("bench_pause", False)
                before = extractor.stored_bytes
                began = time.perf_counter()
                full_s = extractor.run(batch)
                computed_s = extractor.computed_at - began
                print(
                    f"turn {turn}: {tokens} tokens, plain {plain_s:.2f} s, extraction {full_s:.2f} s, of which the "
                    f"engine computed {computed_s:.2f} s; {running.rpc('bench_report')}",
                    flush=True,
                )
                if turn >= 0:
                    plain.append(tokens / plain_s)
                    full.append(tokens / full_s)
                    result["ratio_of_bytes"] = (extractor.stored_bytes - before) / (tokens * state_bytes)
            result["ranks"] = running.rpc("bench_report")
            result["runner"] = running.ranks[0]["model_runner"]
            result["device"] = running.ranks[0]["device"]
        finally:
            running.shutdown()
        result |= {
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
            "size": args.size,
            "plain_tokens_per_s": [round(x) for x in plain],
            "extraction_tokens_per_s": [round(x) for x in full],
            "ratios": [round(f / p, 4) for f, p in zip(full, plain, strict=True)],
            "ratio": round(float(np.median([f / p for f, p in zip(full, plain, strict=True)])), 4),
            "state_bytes_per_s": round(float(np.median(full)) * state_bytes),
            "disk_bytes_per_s": round(speed),
            "spent_s": {k: round(v, 2) for k, v in extractor.spent.items()},
            "refused": extractor.refused[:5],
            "refused_count": len(extractor.refused),
            "writing_ranks": args.writing_ranks,
        }
    if not args.keep:
        shutil.rmtree(root)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
