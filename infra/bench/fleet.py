"""Two nodes against one: the flow ``extract-fleet`` over the same data, in turn, with a real server and workers.

    python -m infra.bench.fleet
    python -m infra.bench.fleet --namespaces     # as root: each node in a network namespace of its own

A node is a Prefect worker with all its processes on one core, and an engine of its own. Both fill one store. Two nodes
extract twice the samples of one. A node's rate is that from one of its commits to a later one, both while all nodes
commit, so that loading the engine is left out; the rates of the nodes are added. Beside it are printed the tokens/s of
the whole run with loading, and how many cores each group of processes kept busy while all nodes commit.

The server and the fleet's own run share the nodes' cores where there are no others, so what they need is missing in the
result. It is a fixed part, and some for each chunk, of any size: a chunk here is 12 samples, about 15 s of one core
and a twentieth of the 65,536 tokens that a chunk has by default. With chunks of a second or two, the server's work for
each of them would be measured instead. A round takes about 6 minutes.
"""

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect.events.worker import EventsWorker
from prefect.logging.handlers import APILogWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.config import Extraction
from infra.bench.processor_time import ProcessorTime
from infra.bench.server import prefect_server
from tasks.plan.shards import cut
from tasks.store import open as open_store
from tasks.vocabulary import PlannedSample
from tests.checkpoints import checkpoint_path
from tests.flows.nodes import deploy, pinned, workers

NETWORK = "10.199.7"
BRIDGE = "layertap-bench"


def write(directory: Path, model: str, samples: int, tokens: int, chunk: int) -> Extraction:
    """A configuration with made-up samples, so many in a chunk."""
    dice = random.Random(0)
    rows = [{"id": f"row-{i}", "input_ids": dice.choices(range(256), k=tokens)} for i in range(samples)]
    data = directory / "samples.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path(model))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(data), "processes": 1},
            "chunk_tokens": chunk * tokens,
            "store": str(directory / "store"),
            "engine": {
                "max_model_len": tokens + 1,
                "max_num_batched_tokens": max(64, tokens),
                "max_num_seqs": 8,
                "kv_cache_gib": 0.2,
                "in_process": True,
                "staging_gib": 0.2,
                "writer_threads": 1,
            },
        }
    )


def group(commands: list[str]) -> str:
    """What a process belongs to, see :class:`ProcessorTime`."""
    if not commands:
        return "fleet"
    if "worker start" in commands[0]:
        return "worker" if len(commands) == 1 else "nodes"
    return "server" if "server start" in commands[0] else "other"


def measure(
    wanted: Extraction, deployment: str, nodes: int, limit: int, chunk: int, store: Path, spent: ProcessorTime
) -> tuple[float, float]:
    """(tokens/s while all nodes commit, tokens/s of the whole run) of so many nodes."""
    from flows.fleet import extract_fleet

    began = time.perf_counter()
    state: Any = extract_fleet(wanted, deployment, nodes, limit=limit, store=str(store), return_state=True)
    seconds = time.perf_counter() - began
    assert state.is_completed(), state.result().lines()
    listing = list(open_store(store).listing())
    shards = cut("bench", [PlannedSample(item.key, item.num_tokens, (0,)) for item in listing], nodes)
    # When each chunk of a node was committed; a chunk's samples are, one after the other.
    commits: list[list[float]] = []
    for shard in shards:
        files = (store / "samples" / item.key[:2] / item.key / "zarr.json" for item in listing if item.key in shard)
        commits.append(sorted(file.stat().st_mtime for file in files)[chunk - 1 :: chunk])
    # Before the first node's second commit and after another's last, not all nodes are known to compute.
    first, last = max(of_node[0] for of_node in commits), min(of_node[-1] for of_node in commits)
    rate = 0.0
    for of_node in commits:
        within = [moment for moment in of_node if first <= moment <= last]
        rate += (len(within) - 1) * chunk * listing[0].num_tokens / (within[-1] - within[0])
    cores = ", ".join(f"{name} {busy:.2f}" for name, busy in sorted(spent.cores(first, last).items()))
    whole = sum(item.num_tokens for item in listing) / seconds
    print(f"{nodes} nodes: {rate:.1f} tokens/s over {last - first:.0f} s; the whole run {whole:.1f}; cores: {cores}")
    return rate, whole


@contextmanager
def namespaces(names: list[str]) -> Iterator[dict[str, list[str]]]:
    """Network namespaces joined by a bridge; what a command begins with to run in each."""

    def ip(*arguments: str, check: bool = True) -> None:
        subprocess.run(["ip", *arguments], check=check, stderr=None if check else subprocess.DEVNULL)

    try:
        ip("link", "add", BRIDGE, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", BRIDGE)
        ip("link", "set", BRIDGE, "up")
        for number, name in enumerate(names, 2):
            ip("netns", "add", name)
            ip("link", "add", f"lt{number}", "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", f"lt{number}", "master", BRIDGE, "up")
            ip("-n", name, "addr", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield {name: ["ip", "netns", "exec", name] for name in names}
    finally:
        for name in names:
            ip("netns", "del", name, check=False)
        ip("link", "del", BRIDGE, check=False)


@contextmanager
def no_namespaces(names: list[str]) -> Iterator[dict[str, list[str]]]:
    """Nodes that share the machine's network."""
    yield {name: [] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", choices=["smollm2", "llama"])
    parser.add_argument("--chunks", type=int, default=5, help="for each node")
    parser.add_argument("--chunk", type=int, default=12, help="samples in a chunk")
    parser.add_argument("--tokens", type=int, default=256, help="of a sample")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--namespaces", action="store_true")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {len(cores)} CPUs, load {os.getloadavg()[0]:.1f}")
    names = ["layertap-a", "layertap-b"]
    rates: dict[int, list[float]] = {1: [], 2: []}
    wholes: dict[int, list[float]] = {1: [], 2: []}
    with (
        tempfile.TemporaryDirectory() as name,
        (namespaces if args.namespaces else no_namespaces)(names) as within,
        prefect_server(f"{NETWORK}.1" if args.namespaces else "127.0.0.1") as address,
        temporary_settings({PREFECT_API_URL: f"{address}/api"}),
    ):
        directory = Path(name)
        wanted = write(directory, args.model, 2 * args.chunks * args.chunk, args.tokens, args.chunk)
        deployment = deploy("bench", "flows/extract.py:extract")
        nodes = {node: [*within[node], *pinned(core)] for node, core in zip(names, cores, strict=False)}
        with (
            ProcessorTime(group) as spent,
            workers(address, "bench", nodes, directory, PREFECT_WORKER_QUERY_SECONDS="10"),  # Prefect's own
        ):
            for number in range(args.rounds):
                for count in rates:
                    store = directory / f"store-{number}-{count}"
                    samples = count * args.chunks * args.chunk
                    rate, whole = measure(wanted, deployment, count, samples, args.chunk, store, spent)
                    rates[count].append(rate)
                    wholes[count].append(whole)
        # What is not sent by now would wait for this server at the end of the process.
        APILogWorker.drain_all(timeout=30)
        EventsWorker.drain_all(timeout=30)
    ratio = statistics.median(rates[2]) / statistics.median(rates[1])
    whole = statistics.median(wholes[2]) / statistics.median(wholes[1])
    print(f"two nodes do {ratio:.2f} times the tokens/s of one; the whole run, with loading, {whole:.2f} times")


if __name__ == "__main__":
    main()
