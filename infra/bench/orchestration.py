"""What Prefect and the plan cost beside the engine: runs over chunks that are all in the store, with a real server.

    python -m infra.bench.orchestration
    python -m infra.bench.orchestration --chunks 100 1000 --samples 16

A store is filled with small made-up samples, and ``layertap extract`` runs over it, once for each number of chunks. The
slope between two numbers is the cost of a chunk, and what is left is the cost of a run.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from prefect.client.orchestration import SyncPrefectClient

from flows.config import Extraction
from infra.bench.server import prefect_server
from tasks.model import resolve
from tasks.store import SourceRecord, StagedSample, Store
from tasks.store.stage import stage_states
from tasks.store.task import open_store
from tests.checkpoints import checkpoint_path

TOKENS = 8


def write(directory: Path, chunks: int, samples: int) -> Extraction:
    """A configuration whose data give so many chunks of so many samples each."""
    rows = [
        {"id": f"row-{i}", "input_ids": [i // 65_536, i // 256 % 256, i % 256, *range(TOKENS - 3)]}
        for i in range(chunks * samples)
    ]
    data = directory / f"{chunks}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama"))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(data), "processes": 1},
            "chunk_tokens": TOKENS * samples,
            "store": str(directory / "store"),
            "engine": {"max_model_len": 64, "in_process": True},
        }
    )


def fill(wanted: Extraction) -> None:
    """Commit every sample of the data, with states of random bits."""
    checkpoint = resolve(wanted.model)
    identity = wanted.identity(checkpoint)
    assert wanted.data.path is not None
    states = np.random.default_rng(0).standard_normal(identity.shape(TOKENS), dtype=np.float32)
    rows = [json.loads(line) for line in wanted.data.path.read_text().splitlines()]
    mask = np.ones(TOKENS, dtype=np.bool_)
    with open_store(wanted.store, identity, checkpoint, "bench") as store:
        for start in range(0, len(rows), 1000):
            part = [(row["id"], np.array(row["input_ids"], dtype=np.int32)) for row in rows[start : start + 1000]]
            store.commit([_staged(store, name, ids, states, mask) for name, ids in part])
            store.record(SourceRecord(name, identity.key(ids), mask) for name, ids in part)


def _staged(store: Store, name: str, ids: Any, states: Any, mask: Any) -> StagedSample:
    key = store.identity.key(ids)
    objects = stage_states(store.staging(), key, store.spec, states, ids)
    return StagedSample(key, TOKENS, objects, mask, 1, [name])


def measure(wanted: Extraction, directory: Path, address: str) -> dict[str, float]:
    """Seconds of ``layertap extract`` from start to end, and of the flow run in it by the server's own account."""
    preset = directory / "preset.yaml"
    preset.write_text(wanted.model_dump_json())
    client = SyncPrefectClient(f"{address}/api")
    before = {each.id for each in client.read_flow_runs()}
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "flows.cli", "extract", str(preset)],
        env=os.environ | {"PREFECT_API_URL": f"{address}/api"},
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    process = time.perf_counter() - began
    (done,) = [each for each in client.read_flow_runs() if each.id not in before]
    assert done.state is not None
    assert done.state.is_completed()
    assert str(done.state.message).startswith("0 extracted"), done.state.message
    return {"process": process, "flow": done.total_run_time.total_seconds()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--samples", type=int, default=1, help="samples of a chunk")
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory() as name, prefect_server() as address:
        directory = Path(name)
        extractions = {n: write(directory, n, args.samples) for n in sorted(args.chunks)}
        fill(extractions[max(extractions)])
        best: dict[int, dict[str, float]] = {}
        for _ in range(args.rounds):
            for chunks, wanted in extractions.items():
                found = measure(wanted, directory, address)
                if chunks not in best or found["flow"] < best[chunks]["flow"]:
                    best[chunks] = found
    for chunks, found in best.items():
        print(
            f"{chunks} chunks of {args.samples} samples, all cached: {found['process']:.1f} s from start to "
            f"end, {found['flow']:.1f} s of them the flow run"
        )
    few, many = min(best), max(best)
    if few < many:
        slope = (best[many]["flow"] - best[few]["flow"]) / (many - few)
        print(f"a chunk costs {1000 * slope:.1f} ms, a run {best[few]['flow'] - few * slope:.1f} s besides")


if __name__ == "__main__":
    main()
