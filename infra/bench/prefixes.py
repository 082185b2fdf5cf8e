"""Extraction with prefixes reused, beside extraction without and vLLM's own method with prefix caching, in one run.

    python -m infra.bench.prefixes                                  # SmolLM2 and a few tool-use conversations on a CPU
    python -m infra.bench.prefixes --model none --size 2 --conversations 1500 --first 0 --longest 0 --unshared 200 \
        --store /dev/shm                        # on GPUs

The conversations are BFCL's, tool schemas in the prompt, in SmolLM2's tokens. Extraction with reuse and without runs in
one engine, in turn, in another order each time; it is all of it, to the last durable sample. vLLM's own method has an
engine of its own: on a CPU it takes turns with them, on GPUs, whose memory is for one engine, it comes after. Each
begins with an empty prefix cache. On a CPU a KV block has 32 tokens in extraction and 128 in vLLM's own method, unless
``--kv-block`` says how many it has in both. Made-up weights (``--model none``: Kimi-shaped) may give states that the
verification refuses; such samples are staged and not committed, and bytes are counted in either place. Prints one JSON
object.
"""

import argparse
import json
import multiprocessing as mp
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infra.assets.chats import chats
from infra.assets.smollm2 import smollm2
from infra.bench.extract import BenchEngine, Extractor, kimi_shaped, prompts
from infra.bench.native import NativeEngine
from tasks.extract import engine as engine_module
from tasks.extract.config import Engine
from tasks.extract.engine import EngineSpec, Job
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.plan.chunks import split
from tasks.plan.prefixes import arrange, known_share
from tasks.store import Store
from tasks.store.stage import STAGE
from tasks.vocabulary import Chunk, DType, Identity, PlannedSample

FIRST = 1500
"""Conversations of the data set to take from."""
Samples = Mapping[str, npt.NDArray[np.int32]]


def conversations(number: int, first: int, longest: int) -> list[npt.NDArray[np.int32]]:
    """Token ids of neighbours in the data set, from the ``first`` on, among the conversations of at most ``longest``
    tokens; none is cut, since what tells many of them apart comes last."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2())
    with chats("bfcl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for _, line in zip(range(FIRST), lines, strict=False)]
    ids = (np.array(tokenizer.encode(_render(row)), np.int32) for row in rows)
    fitting = (ids_T for ids_T in ids if len(ids_T) <= longest)
    return list(islice(fitting, first, first + number))


def _render(row: dict[str, Any]) -> str:
    """A conversation as text, its tools first, for a model whose chat template knows none."""
    tools = "\n".join(json.dumps(tool) for tool in row["tools"])
    turns = [("system", f"You may call these functions:\n<tools>\n{tools}\n</tools>")]
    for message in row["messages"]:
        calls = "\n".join(
            f"<tool_call>{json.dumps(call['function'])}</tool_call>" for call in message.get("tool_calls", ())
        )
        turns.append((message["role"], calls or message["content"]))
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)


class AloneJob(Job):
    """Samples that read nothing from the engine's KV cache and hold no rows for others: extraction without reuse."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._again = set(self.samples)
        self.shared = dict.fromkeys(self.samples, 0)


class PrefixExtractor(Extractor):
    """Extracts planned chunks, with prefixes reused or not."""

    reused = 0
    """Rows."""

    def extract(self, chunks: list[Chunk], samples: Samples, reuse: bool) -> float:
        """Returns the seconds until the last sample is durable."""
        began = time.perf_counter()
        submitted = []
        for chunk in chunks:
            ids = {sample.key: samples[sample.key] for sample in chunk.samples}
            shared = {sample.key: sample.shared for sample in chunk.samples}
            if reuse:
                job = Job(self.store.staging(), ids, shared=shared, on_sample=self._computed)
            else:
                job = AloneJob(self.store.staging(), ids)
            submitted.append((ids, self.engine.submit(job)))
        for ids, receipts in submitted:
            self._finish(dict(ids), receipts)
            self.reused += sum(rows for of_key in receipts.result().values() for _, rows in of_key[0].reused)
        return time.perf_counter() - began


def plan(samples: Samples, chunk_tokens: int, reuse: bool) -> list[Chunk]:
    """Chunks as a run has them."""
    planned = [PlannedSample(key, len(ids), (0,)) for key, ids in samples.items()]
    if reuse:
        planned = arrange(planned, lambda sample: samples[sample.key])
    chunks = split(planned, chunk_tokens, in_order=reuse)
    return [Chunk(chunk.name, chunk.samples, chunk.samples) for chunk in chunks]


def state_bytes(directory: Path) -> tuple[int, int]:
    """Bytes of all samples' files, staged or committed: as if each were its own, and as the disk has them."""
    files = [path.stat() for part in (directory / "samples", directory / ".layertap/staging") for path in _files(part)]
    return sum(f.st_size for f in files), sum({f.st_ino: f.st_size for f in files}.values())


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file()) if directory.is_dir() else iter(())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a checkpoint, `smollm2`, or `none` for Kimi-shaped")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--ids", type=int, nargs="+", help="layers, by output; four spread over the model by default")
    parser.add_argument("--size", type=int, default=1, help="tensor parallel size")
    parser.add_argument("--conversations", type=int, default=10)
    parser.add_argument("--first", type=int, default=552, help="of those that are short enough")
    parser.add_argument("--longest", type=int, default=3000, help="most tokens of one; 0: what max-model-len allows")
    parser.add_argument(
        "--unshared", type=int, default=0, help="so many random prompts afterwards, in rounds of theirs"
    )
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--chunk-tokens", type=int, default=65536)
    parser.add_argument("--kv-block", type=int, help="tokens of a KV block, in both engines")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--reuse-gib", type=float, default=8)
    parser.add_argument("--writer-threads", type=int)
    parser.add_argument("--writing-ranks", choices=["auto", "first", "all"], default="auto")
    parser.add_argument("--staging-gib", type=float)
    parser.add_argument("--store", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--skip-native", action="store_true")
    args = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    checkpoint = _checkpoint(args.model, args.layers, args.experts)
    ids = args.ids or [round(checkpoint.num_layers * part) - 1 for part in (0.1, 0.4, 0.7, 1)]
    layers = Layers(ids=tuple(ids), convention="output")
    dtype: DType = args.dtype or ("bfloat16" if on_gpu else "float32")
    longest = args.longest or args.max_model_len - 2
    max_model_len = min(args.max_model_len, longest + 2, checkpoint.max_position_embeddings or args.max_model_len)
    engine = Engine(
        tensor_parallel_size=args.size,
        max_model_len=max_model_len,
        max_num_batched_tokens=args.batched_tokens or (16384 if on_gpu else 2048),
        max_num_seqs=256 if on_gpu else 16,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.kv_gib or (None if on_gpu else 1.0),
        load_format="dummy" if args.model == "none" else "auto",
        in_process=not on_gpu and args.size == 1,
        staging_gib=args.staging_gib or (24 if on_gpu else 1),
        writer_threads=args.writer_threads or (20 if on_gpu else 2),
        writing_ranks=args.writing_ranks,
        reuse_prefixes="on",
        reuse_gib=args.reuse_gib,
        extra={"block_size": args.kv_block} if args.kv_block else {},
    )
    worker = "infra.bench.bench_worker." + ("Gpu" if on_gpu else "Cpu")
    engine_module.WORKERS.update(cpu=worker, gpu=worker)
    identity = checkpoint.identity(layers, dtype)
    tokens = conversations(args.conversations, args.first, longest)
    samples = {identity.key(ids_T): ids_T for ids_T in tokens}
    arranged = plan(samples, args.chunk_tokens, True)
    in_order = {sample.key: samples[sample.key] for chunk in arranged for sample in chunk.samples}
    random = prompts(args.unshared, min(512, longest // 2), min(4096, longest), checkpoint.vocab_size, 1)
    unshared = {identity.key(ids_T): ids_T for ids_T in random}
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "samples": len(samples),
        "tokens": sum(map(len, samples.values())),
        "known_share": round(known_share(arranged), 3),
    }
    print(json.dumps(result), flush=True)
    root = Path(tempfile.mkdtemp(prefix="layertap-prefixes-", dir=args.store))
    native = None if args.skip_native else Native((checkpoint, layers.depths, dtype, engine, root / "native"), in_order)
    try:
        with Store.open(root / "form", identity, run="bench") as form:
            running = BenchEngine(EngineSpec(checkpoint, layers.depths, dtype, engine, STAGE, form.stage_spec(), True))
        running.start()
        if native and not on_gpu:
            native.start()
        try:
            _warm_up(running, root, checkpoint)
            extractor = PrefixExtractor(running, args.size, args.chunk_tokens)
            few = dict(islice(samples.items(), len(samples) // 8))
            Ways(running, extractor, identity, root).turn(few)  # buffers are filled for the first time
            ways = Ways(running, extractor, identity, root)
            for turn in range(args.rounds):
                if native and not on_gpu and turn % 2:
                    native.turn()
                ways.turn(samples)
                if native and not on_gpu and not turn % 2:
                    native.turn()
            result |= {"runner": running.ranks[0]["model_runner"], "device": running.ranks[0]["device"]}
            result |= ways.result()
            if unshared:
                Ways(running, extractor, identity, root).turn(dict(islice(unshared.items(), 1 + len(unshared) // 8)))
                apart = Ways(running, extractor, identity, root)
                for _ in range(args.rounds):
                    apart.turn(unshared)
                result["unshared"] = apart.result()
        finally:
            running.shutdown()
        if native and on_gpu:
            native.start()
            for _ in range(args.rounds):
                native.turn()
        if native:
            result["native_tokens_per_s"] = [round(rate, 1) for rate in native.rates]
            result["on_to_native"] = _ratio(ways.rates["on"], native.rates)
    finally:
        if native:
            native.stop()
        shutil.rmtree(root)
    print("RESULT " + json.dumps(result), flush=True)


class Ways:
    """Extraction with reuse and without, in turn, in one engine; the way that begins takes turns, too."""

    def __init__(self, running: BenchEngine, extractor: "PrefixExtractor", identity: Identity, root: Path) -> None:
        self.running, self.extractor, self.identity, self.root = running, extractor, identity, root
        self.rates: dict[str, list[float]] = {"off": [], "on": []}
        """Tokens/s of samples, by turn."""
        self.bytes: dict[str, tuple[int, int]] = {}
        """Bytes of a turn's files, and what they take on the disk."""
        self.refused: dict[str, int] = {"off": 0, "on": 0}
        self.reused: list[int] = []
        """Rows, by turn."""
        self.recomputed: list[int] = []
        """Samples, by turn."""

    def turn(self, samples: Samples) -> None:
        for way in ("off", "on") if len(self.rates["on"]) % 2 == 0 else ("on", "off"):
            self._run(way, samples)

    def _run(self, way: str, samples: Samples) -> None:
        extractor, path = self.extractor, self.root / way
        # Nothing that one way has left in the KV cache, in host memory or on the disk is there for the next.
        assert self.running.vllm_engine.reset_prefix_cache()
        self.running.rpc("bench_forget_prefixes")
        shutil.rmtree(self.running.spec.stage_spec["links"], ignore_errors=True)
        extractor.reused, extractor.refused = 0, []
        before = self.running.recomputed
        with Store.open(path, self.identity, run="bench") as extractor.store:
            chunks = plan(samples, extractor.chunk_tokens, way == "on")
            spent = time.process_time()
            seconds = extractor.extract(chunks, samples, way == "on")
            tail = time.perf_counter() - extractor.computed_at
            spent = time.process_time() - spent
        self.rates[way].append(sum(map(len, samples.values())) / seconds)
        self.bytes[way] = state_bytes(path)
        self.refused[way] += len(extractor.refused)
        recomputed = self.running.recomputed - before
        if way == "on":
            self.reused.append(extractor.reused)
            self.recomputed.append(recomputed)
            print(f"on: {seconds:.2f} s, of which {tail:.2f} after the last sample was computed", flush=True)
        print(
            f"{way}: {self.rates[way][-1]:,.1f} tokens/s, {spent:.1f} s of processor time, bytes of files and on the "
            f"disk {self.bytes[way]}, {extractor.reused} rows reused, {recomputed} samples computed again; "
            f"{self.running.rpc('bench_report')}",
            flush=True,
        )
        shutil.rmtree(path)

    def result(self) -> dict[str, Any]:
        files, on_disk = self.bytes["on"]
        return {
            "tokens_per_s": {way: [round(rate, 1) for rate in rates] for way, rates in self.rates.items()},
            "on_to_off": _ratio(self.rates["on"], self.rates["off"]),
            "reused_rows": self.reused,
            "computed_again": self.recomputed,
            "refused": self.refused,
            "bytes": {way: {"files": files, "on_disk": on_disk} for way, (files, on_disk) in self.bytes.items()},
            "disk": round(on_disk / files, 3),
        }


def _checkpoint(model: str, layers: int, experts: int) -> Checkpoint:
    if model == "none":
        return kimi_shaped(layers, experts)
    return read(smollm2() if model == "smollm2" else Path(model))


def _ratio(ours: list[float], theirs: list[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(ours, theirs, strict=True)]


def warm_up_prompts(checkpoint: Checkpoint) -> list[npt.NDArray[np.int32]]:
    """Prompts enough for steps as large as those that count, for which a GPU's kernels are chosen and compiled."""
    count, shortest, longest = (24, 512, 4096) if torch.cuda.is_available() else (8, 64, 128)
    return prompts(count, shortest, longest, checkpoint.vocab_size, 0)


def _warm_up(engine: BenchEngine, root: Path, checkpoint: Checkpoint) -> None:
    """The first steps of an engine are slow; their samples go nowhere."""
    directory = root / "warm-up"
    directory.mkdir(exist_ok=True)
    batch = warm_up_prompts(checkpoint)
    engine.submit(AloneJob(directory, {f"{i:064x}": ids for i, ids in enumerate(batch)})).result()
    shutil.rmtree(directory)


class Native:
    """vLLM's own method in a process of its own, given the samples in the order that suits its prefix cache, too."""

    def __init__(self, arguments: tuple[Any, ...], samples: Samples) -> None:
        """``arguments``: of :class:`NativeEngine`."""
        self.rates: list[float] = []
        """Tokens/s, by turn."""
        self._tokens = sum(map(len, samples.values()))
        self._connection, self._theirs = mp.Pipe()
        process = mp.get_context("spawn").Process
        self._process = process(target=_serve_native, args=(self._theirs, arguments, samples))

    def start(self) -> None:
        """Returns once it is warm."""
        self._process.start()
        self._theirs.close()  # so that its end shows
        self._connection.recv()

    def turn(self) -> None:
        """Extract all samples, beginning with an empty prefix cache."""
        self._connection.send(len(self.rates))
        seconds, spent = self._connection.recv()
        self.rates.append(self._tokens / seconds)
        print(f"native: {self.rates[-1]:,.1f} tokens/s, {spent:.1f} s of processor time", flush=True)

    def stop(self) -> None:
        """End the engine, if it was started."""
        if self._process.is_alive():
            self._connection.send(None)
            self._process.join()


def _serve_native(connection: "Connection[Any, Any]", arguments: tuple[Any, ...], samples: Samples) -> None:
    running = NativeEngine(*arguments, prefix_caching=True)
    checkpoint, *_, directory = arguments
    running.run({f"warm-up-{i}": ids for i, ids in enumerate(warm_up_prompts(checkpoint))})
    connection.send(None)
    while (turn := connection.recv()) is not None:
        running.reset()
        spent = time.process_time()
        seconds = running.run({f"{key}-{turn}": ids for key, ids in samples.items()})
        connection.send((seconds, time.process_time() - spent))
        shutil.rmtree(directory)
        directory.mkdir()
    running.shutdown()


if __name__ == "__main__":
    main()
