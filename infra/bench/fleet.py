"""Two nodes against one: the flow ``extract-fleet`` over the same data, in turn, with a real server and workers.

    python -m infra.bench.fleet
    python -m infra.bench.fleet --namespaces     # as root: each node in a network namespace of its own

A node is a Prefect worker with all its processes on one core, and an engine of its own. Both fill one store. The rate
is that of the commits while all nodes commit, so that loading the engine is left out; the time of the whole run is
printed beside it. The server and the fleet's own run share the nodes' cores where there are no others.
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
from infra.bench.server import prefect_server
from tasks.plan.shards import cut
from tasks.store import open as open_store
from tasks.vocabulary import PlannedSample
from tests.checkpoints import checkpoint_path
from tests.flows.nodes import deploy, pinned, workers

NETWORK = "10.199.7"
BRIDGE = "layertap-bench"


def write(directory: Path, model: str, samples: int, tokens: int) -> Extraction:
    """A configuration with made-up samples."""
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
            "chunk_tokens": 4 * tokens,
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


def measure(wanted: Extraction, deployment: str, nodes: int, store: Path) -> tuple[float, float]:
    """(tokens/s of the commits while all nodes commit, seconds of the whole run) with so many nodes."""
    from flows.fleet import extract_fleet

    began = time.perf_counter()
    state: Any = extract_fleet(wanted, deployment, nodes, store=str(store), return_state=True)
    seconds = time.perf_counter() - began
    assert state.is_completed(), state.result().lines()
    reader = open_store(store)
    shards = cut("bench", [PlannedSample(item.key, item.num_tokens, (0,)) for item in reader.listing()], nodes)
    commits: list[list[tuple[float, int]]] = [[] for _ in shards]
    for item in reader.listing():
        moment = (store / "samples" / item.key[:2] / item.key / "zarr.json").stat().st_mtime
        commits[next(i for i, shard in enumerate(shards) if item.key in shard)].append((moment, item.num_tokens))
    # What a node's first commit brought was computed before it; when the first node is done, the others go on alone.
    first = max(min(of_node)[0] for of_node in commits)
    last = min(max(of_node)[0] for of_node in commits)
    return sum(n for of_node in commits for moment, n in of_node if first < moment <= last) / (last - first), seconds


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
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--namespaces", action="store_true")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    print(f"{platform.machine()}, {len(cores)} CPUs, load {os.getloadavg()[0]:.1f}")
    names = ["layertap-a", "layertap-b"]
    rates: dict[int, list[float]] = {1: [], 2: []}
    times: dict[int, list[float]] = {1: [], 2: []}
    with (
        tempfile.TemporaryDirectory() as name,
        (namespaces if args.namespaces else no_namespaces)(names) as within,
        prefect_server(f"{NETWORK}.1" if args.namespaces else "127.0.0.1") as address,
        temporary_settings({PREFECT_API_URL: f"{address}/api"}),
    ):
        directory = Path(name)
        wanted = write(directory, args.model, args.samples, args.tokens)
        deployment = deploy("bench", "flows/extract.py:extract")
        nodes = {node: [*within[node], *pinned(core)] for node, core in zip(names, cores, strict=False)}
        with workers(address, "bench", nodes, directory, PREFECT_WORKER_QUERY_SECONDS="10"):  # Prefect's own
            for number in range(args.rounds):
                for count in rates:
                    rate, seconds = measure(wanted, deployment, count, directory / f"store-{number}-{count}")
                    rates[count].append(rate)
                    times[count].append(seconds)
                    print(f"{count} nodes: {rate:.1f} tokens/s, the whole run {seconds:.1f} s", flush=True)
        # What is not sent by now would wait for this server at the end of the process.
        APILogWorker.drain_all(timeout=30)
        EventsWorker.drain_all(timeout=30)
    ratio = statistics.median(rates[2]) / statistics.median(rates[1])
    whole = statistics.median(times[1]) / statistics.median(times[2])
    print(
        f"two nodes do {ratio:.2f} times the tokens/s of one; the whole run, with loading, is {whole:.2f} times as fast"
    )


if __name__ == "__main__":
    main()
