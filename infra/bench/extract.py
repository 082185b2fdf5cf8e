"""Extraction beside plain prefill, in turn, in one engine and one run.

    python -m infra.bench.extract --size 2 --store /dev/shm --native
    python -m infra.bench.extract --size 2 --store /dev/shm --native --layers 61 --experts 32 --ids 2 30 58 60
    python -m infra.bench.extract --size 2 --store /dev/shm --rounds 0 --minutes 5

The model is Kimi-shaped (hidden 7168, MLA, MoE) with dummy weights, or any checkpoint (``--model``). Extraction means
all of it: capture, copy, digests on every rank and again on arrival, encoding, checksums, verification, and a durable
commit; its time ends when the last sample is durable. A round has so many prompts that plain prefill takes
``--seconds``, since writing the last step's samples is a fixed cost. Each round has a store of its own.

``--native`` runs vLLM's own ``extract_hidden_states`` in a second engine on the same prompts; its time ends when the
last byte of its files is on the disk, too. ``--minutes`` goes on with rounds of extraction and prints the host memory
of every process after each. ``VLLM_USE_V2_MODEL_RUNNER=1`` in the environment chooses vLLM's V2 model runner, except
for its own extraction, which knows V1 only. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infra.bench.bench_worker import resident
from infra.bench.native import NativeEngine
from tasks.extract import engine as engine_module
from tasks.extract.config import Engine
from tasks.extract.engine import CaptureEngine, EngineSpec, Job
from tasks.extract.receipts import Inbox
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.store import StagedSample, Store
from tasks.store.provenance import environment
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

    def __init__(self, engine: BenchEngine, size: int, chunk_tokens: int) -> None:
        self.engine, self.size, self.chunk_tokens = engine, size, chunk_tokens
        self.store: Store
        self.spent = {"verify": 0.0, "commit": 0.0}
        self.stored_bytes = 0
        self.computed_at = 0.0
        """When the engine finished its last sample."""
        self.refused: list[str] = []

    def run(self, samples: list[npt.NDArray[np.int32]], path: Path, identity: Identity) -> float:
        """Extract, verify and commit to a store that is then removed; the seconds until the last sample is durable."""
        with Store.open(path, identity, run="bench") as self.store:
            seconds = self._run(samples)
        shutil.rmtree(path)
        return seconds

    def _run(self, samples: list[npt.NDArray[np.int32]]) -> float:
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


class Rounds:
    """Rounds of plain prefill and of extraction in one engine."""

    def __init__(self, running: BenchEngine, extractor: Extractor, identity: Identity, root: Path) -> None:
        self.running, self.extractor, self.identity, self.root = running, extractor, identity, root
        self.plain: list[float] = []
        """Tokens/s, by round."""
        self.full: list[float] = []
        self.tails: list[float] = []
        """Seconds from the engine's last sample to the last durable byte, by round."""
        self.stored: list[float] = []
        """Bytes stored per token, by round."""
        self.host: list[dict[str, int]] = []
        """Host memory of all processes together in bytes after each round of extraction, by kind."""

    def prefill(self, batch: list[npt.NDArray[np.int32]]) -> float:
        """Seconds of plain prefill."""
        self.running.rpc("bench_pause", True)
        began = time.perf_counter()
        job = PlainJob(self.root, {f"{i:064x}": ids for i, ids in enumerate(batch)})
        self.running.submit(job).result()
        seconds = time.perf_counter() - began
        self.running.rpc("bench_pause", False)
        return seconds

    def extraction(self, batch: list[npt.NDArray[np.int32]]) -> tuple[float, float]:
        """Seconds of extraction, and how many of them came after the engine's last sample."""
        began = time.perf_counter()
        seconds = self.extractor.run(batch, self.root / "store", self.identity)
        return seconds, seconds - (self.extractor.computed_at - began)

    def warm_up(self, batch: list[npt.NDArray[np.int32]], again: list[npt.NDArray[np.int32]]) -> float:
        """Both, uncounted, since kernels are compiled on first use; returns tokens/s of plain prefill afterwards."""
        self.prefill(batch)
        self.extraction(batch)
        return sum(map(len, again)) / self.prefill(again)

    def both(self, batch: list[npt.NDArray[np.int32]]) -> None:
        """One round that counts."""
        tokens = sum(map(len, batch))
        plain_s = self.prefill(batch)
        self.plain.append(tokens / plain_s)
        print(f"{tokens} tokens, plain {plain_s:.2f} s = {tokens / plain_s:,.0f} tokens/s", flush=True)
        self.extract(batch)

    def extract(self, batch: list[npt.NDArray[np.int32]]) -> None:
        """One round of extraction that counts."""
        tokens, before = sum(map(len, batch)), self.extractor.stored_bytes
        seconds, tail = self.extraction(batch)
        self.full.append(tokens / seconds)
        self.tails.append(tail)
        self.stored.append((self.extractor.stored_bytes - before) / tokens)
        held: dict[str, int] = {"flow": resident(os.getpid())}
        for of_rank in self.running.rpc("bench_host"):
            for kind, size in of_rank.items():
                held[kind] = held.get(kind, 0) + size
        self.host.append(held)
        print(
            f"{tokens} tokens, extraction {seconds:.2f} s = {tokens / seconds:,.0f} tokens/s, of which {tail:.2f} s "
            f"after the last was computed; host GiB: { {k: round(v / 2**30, 2) for k, v in held.items()} }; "
            f"{self.running.rpc('bench_report')}",
            flush=True,
        )


def kv_capacity(vllm_engine: Any) -> dict[str, int]:
    """Tokens that an engine's KV cache holds, as vLLM counts them; where layers differ, not a product of the others."""
    cache = vllm_engine.vllm_config.cache_config
    blocks, block_size = int(cache.num_gpu_blocks or 0), int(cache.block_size)
    tokens = getattr(cache, "kv_cache_size_tokens", None) or blocks * block_size
    return {"blocks": blocks, "block_size": block_size, "tokens": int(tokens)}


def run_native(args: argparse.Namespace, checkpoint: Checkpoint, layers: Layers, engine: Engine) -> dict[str, Any]:
    """vLLM's own extraction in this process, which must not have started another engine: rounds on the same prompts.

    Its files appear under ``--store``.
    """
    files = Path(tempfile.mkdtemp(prefix="native-", dir=args.store))
    running = NativeEngine(checkpoint, layers.depths, args.dtype, engine, files, prefix_caching=False)
    result: dict[str, Any] = {"kv": kv_capacity(running.engine), "tokens_per_s": [], "bytes_per_token": []}
    try:
        for turn in range(-1, max(1, args.rounds)):
            count, seed = (args.prompts, turn) if turn >= 0 else (24, 10_001)  # the first warms up and does not count
            batch = prompts(count, args.shortest, args.longest, checkpoint.vocab_size, seed)
            tokens = sum(map(len, batch))
            seconds = running.run({f"turn-{turn}-{i}": ids for i, ids in enumerate(batch)})
            print(f"native: {tokens} tokens in {seconds:.2f} s = {tokens / seconds:,.0f} tokens/s", flush=True)
            written = list(files.glob("*.safetensors"))
            if turn >= 0:
                result["tokens_per_s"].append(round(tokens / seconds))
                result["bytes_per_token"].append(round(sum(path.stat().st_size for path in written) / tokens))
            for path in written:
                path.unlink()
    finally:
        running.shutdown()
        shutil.rmtree(files, ignore_errors=True)
    return result


def native_beside(count: int) -> dict[str, Any]:
    """:func:`run_native` in a process of its own, with the same arguments and so many prompts."""
    command = [sys.executable, "-m", "infra.bench.extract", *sys.argv[1:], "--native-only", "--prompts", str(count)]
    found: dict[str, Any] = {"failed": "it printed no result"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            if line.startswith("NATIVE "):
                found = json.loads(line.removeprefix("NATIVE "))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; Kimi-shaped with dummy weights when absent")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ids", type=int, nargs="+", default=[2, 7, 11, 15], help="layers, by output")
    parser.add_argument("--size", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--seconds", type=float, default=20, help="of plain prefill in a round")
    parser.add_argument("--prompts", type=int, help="of a round; by --seconds when absent")
    parser.add_argument("--warm-up", type=int, default=64, help="prompts before the first round, to fill buffers, too")
    parser.add_argument("--shortest", type=int, default=512)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=2, help="of plain prefill and extraction, in turn")
    parser.add_argument("--minutes", type=float, default=0, help="go on with extraction for so long")
    parser.add_argument("--native", action="store_true", help="run vLLM's own extraction, too")
    parser.add_argument("--native-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--batched-tokens", type=int, default=16384)
    parser.add_argument("--max-model-len", type=int, default=8192)
    parser.add_argument("--chunk-tokens", type=int, default=65536)
    parser.add_argument("--writer-threads", type=int, default=26)
    parser.add_argument("--writing-ranks", choices=["auto", "first", "all"], default="auto")
    parser.add_argument("--staging-gib", type=float, default=24)
    parser.add_argument("--ring-slots", type=int)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    return parser.parse_args()


def main() -> None:
    args = parse()
    checkpoint = read(args.model) if args.model else kimi_shaped(args.layers, args.experts)
    layers = Layers(ids=tuple(args.ids), convention="output")
    layers.check(checkpoint.num_layers)
    engine = Engine(
        tensor_parallel_size=args.size,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.batched_tokens,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.kv_gib,
        load_format="auto" if args.model else "dummy",
        staging_gib=args.staging_gib,
        writer_threads=args.writer_threads,
        writing_ranks=args.writing_ranks,
        ring_slots=args.ring_slots,
    )
    if args.native_only:
        print("NATIVE " + json.dumps(run_native(args, checkpoint, layers, engine)), flush=True)
        return
    worker = "infra.bench.bench_worker." + ("Gpu" if torch.cuda.is_available() else "Cpu")
    engine_module.WORKERS.update(cpu=worker, gpu=worker)
    identity = checkpoint.identity(layers, args.dtype)
    state_bytes = len(layers.depths) * checkpoint.hidden_size * (2 if args.dtype == "bfloat16" else 4)
    root = Path(tempfile.mkdtemp(prefix="layertap-bench-", dir=args.store))
    # The store may be in memory, to keep the disk out of the way; then both are of interest.
    places = dict.fromkeys((args.store, Path(tempfile.gettempdir())))
    speeds = {str(place): round(disk_speed(place)) for place in places}
    result: dict[str, Any] = {
        "versions": environment()["versions"],
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "model": str(args.model or f"Kimi-shaped, {args.layers} layers, {args.experts} experts"),
        "depths": layers.depths,
        "size": args.size,
        "write_bytes_per_s": speeds,
    }

    def batch(count: int, seed: int) -> list[npt.NDArray[np.int32]]:
        return prompts(count, args.shortest, args.longest, checkpoint.vocab_size, seed)

    try:
        with Store.open(root / "form", identity, run="bench") as form:
            spec = EngineSpec(checkpoint, layers.depths, args.dtype, engine, STAGE, form.spec.to_dict())
        began = time.perf_counter()
        running = BenchEngine(spec).start()
        result["start_s"] = round(time.perf_counter() - began, 1)
        try:
            rounds = Rounds(running, Extractor(running, args.size, args.chunk_tokens), identity, root)
            few = args.prompts or args.warm_up
            speed = rounds.warm_up(batch(few, 10_001), batch(few, 10_002))
            count = args.prompts or max(24, round(args.seconds * speed / ((args.shortest + args.longest) / 2)))
            print(f"warm: {speed:,.0f} tokens/s; {count} prompts a round", flush=True)
            for turn in range(args.rounds):
                rounds.both(batch(count, turn))
            until = time.monotonic() + 60 * args.minutes
            turn = args.rounds
            while time.monotonic() < until:
                rounds.extract(batch(count, turn))
                turn += 1
            result |= {
                "prompts": count,
                "ranks": running.rpc("bench_report"),
                "runner": running.ranks[0]["model_runner"],
                "device": running.ranks[0]["device"],
                "settings": running.facts,
                "kv": kv_capacity(running.vllm_engine),
            }
        finally:
            running.shutdown()
        ratios = [f / p for f, p in zip(rounds.full, rounds.plain, strict=False)]
        extractor = rounds.extractor
        result |= {
            "plain_tokens_per_s": [round(x) for x in rounds.plain],
            "extraction_tokens_per_s": [round(x) for x in rounds.full],
            "ratios": [round(r, 4) for r in ratios],
            "ratio": round(float(np.median(ratios)), 4) if ratios else None,
            "tail_s": [round(t, 2) for t in rounds.tails],
            "bytes_per_token": [round(b) for b in rounds.stored],
            "ratio_of_bytes": round(float(np.median(rounds.stored)) / state_bytes, 4) if rounds.stored else None,
            "state_bytes_per_s": round(float(np.median(rounds.full)) * state_bytes) if rounds.full else None,
            "host_bytes": rounds.host,
            "spent_s": {k: round(v, 2) for k, v in extractor.spent.items()},
            "refused": extractor.refused[:5],
            "refused_count": len(extractor.refused),
        }
        if args.native:
            result["native"] = native_beside(count)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
