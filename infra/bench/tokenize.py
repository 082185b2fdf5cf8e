"""Speed and memory of tokenizing real chats, against doing it one conversation at a time in one process.

    python -m infra.bench.tokenize              # speed
    python -m infra.bench.tokenize memory       # peak memory on 10,000 to 1,000,000 conversations

Speed is compared in one run, in alternation, on the same conversations (tool sessions and talk, Qwen3's tokenizer and
template). The yardsticks, each with one thread:

* ``transformers``: ``apply_chat_template(messages, tools=..., tokenize=True)`` for each line; no loss mask, no
  checks, no key.
* ``one at a time``: the samples as Layertap writes them, one conversation at a time in one process.

Times are of the whole call, loading the tokenizer and starting processes included; figures are medians. On a machine
with other work the CPU time says more: with as many free cores as processes, the last line takes its CPU time divided
by their number.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from infra.assets.chats import chats
from infra.assets.smollm2 import smollm2
from infra.assets.tokenizers import tokenizer
from tasks.model import read
from tasks.samples import SampleTable, SampleTableWriter
from tasks.tokenize import pipeline
from tasks.tokenize.config import Data
from tasks.tokenize.rows import Conversation, parse
from tasks.tokenize.sources import rows
from tasks.vocabulary import Identity

IDENTITY = Identity("bench", "Qwen3ForCausalLM", 36, 4096, (2, 18, 33, 36), "input", (2, 18, 33, 36), "bfloat16")
VOCAB_SIZE = 151_936
MAX_TOKENS = 8191


def layertap(directory: Path, data: Data, out: Path) -> int:
    """Write the table; the number of tokens."""
    job = pipeline.Job(directory, VOCAB_SIZE, False, data, IDENTITY, MAX_TOKENS)
    with SampleTableWriter(out) as table:
        for outcome in pipeline.outcomes(job, out.parent):
            table.add(outcome.samples)
    return int(SampleTable(out).num_tokens.sum())


def one_at_a_time(directory: Path, data: Data, out: Path) -> int:
    """The same table, with nothing shared between conversations but the loaded tokenizer."""
    job = pipeline.Job(directory, VOCAB_SIZE, False, data, IDENTITY, MAX_TOKENS)
    encoder = job.encoder()
    with SampleTableWriter(out) as table:
        for row in rows(data, out.parent):
            for outcome in pipeline.process(job, encoder, [row]):
                table.add(outcome.samples)
            encoder.tokenizer.forget()
    return int(SampleTable(out).num_tokens.sum())


def with_transformers(directory: Path, data: Data, out: Path) -> int:
    """What a short script does."""
    from transformers import AutoTokenizer

    own = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokens = 0
    for row in rows(data, out.parent):
        assert isinstance(row.value, bytes)
        item = parse(json.loads(row.value), data.all_sources[0].columns, "x")
        assert isinstance(item, Conversation)
        ids = own.apply_chat_template(item.messages, tools=item.tools, tokenize=True, return_dict=False)
        tokens += min(len(ids), MAX_TOKENS)
    return tokens


def speed(count: int, rounds: int, processes: int) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    directory = tokenizer("qwen3")
    lines: list[bytes] = []
    for name in ("bfcl", "chitchat", "human-eval"):
        lines += chats(name).read_bytes().splitlines(keepends=True)
    lines = lines[:: max(1, len(lines) // count)]
    with tempfile.TemporaryDirectory() as scratch:
        path, out = Path(scratch) / "chats.jsonl", Path(scratch) / "out"
        path.write_bytes(b"".join(lines))
        one, several = Data(path=path, processes=1), Data(path=path, processes=processes)
        ways: dict[str, Callable[[], int]] = {
            "transformers": lambda: with_transformers(directory, one, out),
            "one at a time": lambda: one_at_a_time(directory, one, out),
            "layertap, 1 process": lambda: layertap(directory, one, out),
            f"layertap, {processes} processes": lambda: layertap(directory, several, out),
        }
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        processor: dict[str, list[float]] = {name: [] for name in ways}
        tokens: dict[str, int] = {}
        for _ in range(rounds):
            for name, run in ways.items():
                began, spent = time.monotonic(), processor_seconds()
                tokens[name] = run()
                seconds[name].append(time.monotonic() - began)
                processor[name].append(processor_seconds() - spent)
    print(f"{len(lines):,} conversations, {len(b''.join(lines)) / 1e6:.1f} MB, median of {rounds} rounds")
    last = statistics.median(seconds[f"layertap, {processes} processes"])
    print(f"{'':22} {'time':>9} {'of CPU':>9} {'tokens/s':>9} {'time / the last one':>20}")
    for name, values in seconds.items():
        median, cpu = statistics.median(values), statistics.median(processor[name])
        print(f"{name:22} {median:7.2f} s {cpu:7.2f} s {tokens[name] / median:9,.0f} {median / last:19.2f}x")


def processor_seconds() -> float:
    """CPU time of this process and of its children that have ended; other load on the machine hardly changes it."""
    used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def memory(sizes: list[int]) -> None:
    """Each size in a process of its own: what grows with the rows shows between the sizes."""
    print(f"{'conversations':>13} {'file':>9} {'seconds':>8} {'peak, main':>11} {'a worker':>9}")
    for size in sizes:
        command = [sys.executable, "-m", "infra.bench.tokenize", "memory-of", "--count", str(size)]
        print(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip("\n"), flush=True)


def memory_of(count: int) -> None:
    checkpoint = read(smollm2())
    with tempfile.TemporaryDirectory() as scratch:
        path, out = Path(scratch) / "chats.jsonl", Path(scratch) / "out"
        with path.open("w") as file:
            for i in range(count):
                turns = [("user", f"What is {i} plus {i % 97}?"), ("assistant", f"It is {i + i % 97}.")]
                file.write(json.dumps({"id": i, "messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
        size = path.stat().st_size
        began = time.monotonic()
        report = pipeline.tokenize(Data(path=path, processes=2), checkpoint, IDENTITY, 8192, out)
        seconds = time.monotonic() - began
        assert report.kept == count, report
    own, worker = (resource.getrusage(w).ru_maxrss / 1024 for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{count:13,} {size / 2**20:5.0f} MiB {seconds:8.1f} {own:7.0f} MiB {worker:5.0f} MiB")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m infra.bench.tokenize", description=__doc__)
    parser.add_argument("what", nargs="?", choices=["speed", "memory", "memory-of"], default="speed")
    parser.add_argument("--count", type=int, default=6000, help="about how many conversations to take")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    if args.what == "speed":
        speed(args.count, args.rounds, args.processes)
    elif args.what == "memory":
        memory([10_000, 100_000, 1_000_000])
    else:
        memory_of(args.count)


if __name__ == "__main__":
    main()
