"""Extraction with prefixes reused, beside extraction without and vLLM's own method with prefix caching, in one run.

    python -m infra.bench.prefixes                                  # SmolLM2 and a few tool-use conversations on a CPU
    python -m infra.bench.prefixes --model none --size 2 --conversations 1500 --first 0 --longest 0   # on GPUs
    python -m infra.bench.prefixes --unshared --skip-native         # prompts that share nothing

The conversations are BFCL's, tool schemas in the prompt, in SmolLM2's tokens. Each round starts the engines anew and
runs the ways in turn, in another order each time; extraction is all of it, to the last durable sample. Made-up weights
(``--model none``: Kimi-shaped) give states that the verification refuses, so their samples are staged and not
committed; bytes are counted in either place. Prints one JSON object.
"""

import argparse
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from infra.assets.chats import chats
from infra.assets.smollm2 import smollm2
from infra.bench.extract import BenchEngine, Extractor, kimi_shaped, prompts
from infra.bench.native import NativeEngine
from tasks.extract.config import Engine
from tasks.extract.engine import EngineSpec, Job
from tasks.layers import Layers
from tasks.model import Checkpoint, read
from tasks.plan.chunks import split
from tasks.plan.prefixes import arrange, known_share
from tasks.store import Store
from tasks.store.stage import STAGE
from tasks.vocabulary import Chunk, DType, PlannedSample

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

    def extract(self, chunks: list[Chunk], samples: Samples, reuse: bool) -> float:
        """Returns the seconds until the last sample is durable."""
        began = time.perf_counter()
        submitted = []
        for chunk in chunks:
            ids = {sample.key: samples[sample.key] for sample in chunk.samples}
            shared = {sample.key: sample.shared for sample in chunk.samples}
            job = Job(self.store.staging(), ids, shared=shared) if reuse else AloneJob(self.store.staging(), ids)
            submitted.append((ids, self.engine.submit(job)))
        for ids, receipts in submitted:
            self._finish(dict(ids), receipts)
            self.reused += sum(rows for of_key in receipts.result().values() for _, rows in of_key[0].reused)
        return time.perf_counter() - began

    reused = 0


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
    parser.add_argument("--unshared", action="store_true", help="random prompts of the same number instead")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"])
    parser.add_argument("--batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int, default=32768)
    parser.add_argument("--chunk-tokens", type=int, default=65536)
    parser.add_argument("--kv-block", type=int, help="tokens of a KV block; vLLM's own by default, 32 on a CPU")
    parser.add_argument("--kv-gib", type=float)
    parser.add_argument("--memory", type=float, default=0.85, help="share of the GPU's memory")
    parser.add_argument("--reuse-gib", type=float, default=8)
    parser.add_argument("--writer-threads", type=int)
    parser.add_argument("--writing-ranks", choices=["first", "all"], default="first")
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
    block = args.kv_block or (None if on_gpu else 32)
    engine = Engine(
        tensor_parallel_size=args.size,
        max_model_len=max_model_len,
        max_num_batched_tokens=args.batched_tokens or (16384 if on_gpu else 2048),
        max_num_seqs=64 if on_gpu else 16,
        gpu_memory_utilization=args.memory,
        kv_cache_gib=args.kv_gib or (None if on_gpu else 1.0),
        load_format="dummy" if args.model == "none" else "auto",
        in_process=not on_gpu and args.size == 1,
        staging_gib=args.staging_gib or (24 if on_gpu else 1),
        writer_threads=args.writer_threads or (24 if on_gpu else 2),
        writing_ranks=args.writing_ranks,
        reuse_prefixes="on",
        reuse_gib=args.reuse_gib,
        extra={"block_size": block} if block else {},
    )
    identity = checkpoint.identity(layers, dtype)
    if args.unshared:
        tokens = prompts(args.conversations, longest // 2, longest, checkpoint.vocab_size, 1)
    else:
        tokens = conversations(args.conversations, args.first, longest)
    samples = {identity.key(ids_T): ids_T for ids_T in tokens}
    count = sum(map(len, samples.values()))
    arranged = plan(samples, args.chunk_tokens, True)
    in_order = {sample.key: samples[sample.key] for chunk in arranged for sample in chunk.samples}
    result: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "samples": len(samples),
        "tokens": count,
        "known_share": round(known_share(arranged), 3),
    }
    print(json.dumps(result), flush=True)
    rates: dict[str, list[float]] = {"reuse on": [], "reuse off": [], "native": []}
    root = Path(tempfile.mkdtemp(prefix="layertap-prefixes-", dir=args.store))
    ways = ["off", "on", "native"]
    for turn in range(args.rounds):
        order = ways if turn % 2 == 0 else ways[::-1]
        if not args.skip_native and order[0] == "native":
            rates["native"].append(_native(checkpoint, layers, dtype, engine, root / "native", in_order))
        with (
            Store.open(root / "off", identity, run="bench") as off,
            Store.open(root / "on", identity, run="bench") as on,
        ):
            spec = EngineSpec(checkpoint, layers.depths, dtype, engine, STAGE, on.stage_spec(), reuse=True)
            running = BenchEngine(spec)
            running.start()
            try:
                _warm_up(running, root, checkpoint)
                for way in order:
                    if way == "native":
                        continue
                    # What one way has left in the KV cache, with no rows held, is not there for the next.
                    assert running.vllm_engine.reset_prefix_cache()
                    extractor = PrefixExtractor(running, args.size, args.chunk_tokens)
                    extractor.store = on if way == "on" else off
                    chunks = arranged if way == "on" else plan(samples, args.chunk_tokens, False)
                    spent = time.process_time()
                    seconds = extractor.extract(chunks, samples, way == "on")
                    spent = time.process_time() - spent
                    rates[f"reuse {way}"].append(count / seconds)
                    result[f"{way}_refused"] = len(extractor.refused)
                    if way == "on":
                        result["reused_rows"] = extractor.reused
                        result["computed_again"] = running.recomputed
                    print(
                        f"turn {turn}: {way} {count / seconds:.1f} tokens/s, {spent:.1f} s of processor time",
                        flush=True,
                    )
                for way in ("off", "on"):
                    apart, shared = state_bytes(root / way)
                    result[f"{way}_bytes"] = {"files": apart, "on_disk": shared}
                    print(f"turn {turn}: {way} {apart:,} bytes of files, {shared:,} on the disk", flush=True)
            finally:
                running.shutdown()
            result["runner"], result["device"] = running.ranks[0]["model_runner"], running.ranks[0]["device"]
        if not args.skip_native and order[-1] == "native":
            rates["native"].append(_native(checkpoint, layers, dtype, engine, root / "native", in_order))
        shutil.rmtree(root / "off")
        shutil.rmtree(root / "on")
    shutil.rmtree(root)
    result["tokens_per_s"] = {way: [round(rate, 1) for rate in found] for way, found in rates.items()}
    result["on_to_off"] = _ratio(rates["reuse on"], rates["reuse off"])
    if not args.skip_native:
        result["on_to_native"] = _ratio(rates["reuse on"], rates["native"])
    result["disk"] = round(result["on_bytes"]["on_disk"] / result["on_bytes"]["files"], 3)
    print("RESULT " + json.dumps(result), flush=True)


def _checkpoint(model: str, layers: int, experts: int) -> Checkpoint:
    if model == "none":
        return kimi_shaped(layers, experts)
    return read(smollm2() if model == "smollm2" else Path(model))


def _ratio(ours: list[float], theirs: list[float]) -> list[float]:
    return [round(a / b, 3) for a, b in zip(ours, theirs, strict=True)]


def _warm_up(engine: BenchEngine, root: Path, checkpoint: Checkpoint) -> None:
    """The first steps of an engine are slow; their samples go nowhere."""
    directory = root / "warm-up"
    directory.mkdir(exist_ok=True)
    batch = prompts(8, 64, 128, checkpoint.vocab_size, 0)
    engine.submit(AloneJob(directory, {f"{i:064x}": ids for i, ids in enumerate(batch)})).result()
    shutil.rmtree(directory)


def _native(
    checkpoint: Checkpoint, layers: Layers, dtype: DType, engine: Engine, directory: Path, samples: Samples
) -> float:
    """Tokens/s of vLLM's own method, given the samples in the order that suits its prefix cache, too."""
    running = NativeEngine(checkpoint, layers.depths, dtype, engine, directory)
    try:
        batch = prompts(8, 64, 128, checkpoint.vocab_size, 0)
        running.run({f"warm-up-{i}": ids for i, ids in enumerate(batch)})
        rate = sum(map(len, samples.values())) / running.run(samples)
    finally:
        running.shutdown()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"native {rate:.1f} tokens/s", flush=True)
    return rate


if __name__ == "__main__":
    main()
