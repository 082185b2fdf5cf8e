"""Two nodes, each with an engine of its own, fill one store; one is killed on the way."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from flows.config import Extraction
from flows.extract import extract
from flows.fleet import extract_fleet, shard_parameters
from tasks.fleet.summary import FleetSummary
from tasks.store import Share, Store
from tasks.store import open as open_store
from tasks.store.maintenance import verify
from tests.checkpoints import checkpoint_path
from tests.flows import dying
from tests.flows.nodes import deploy, pinned, workers

LENGTHS = [5 + i % 23 for i in range(40)]
CORES = sorted(os.sched_getaffinity(0))


def extraction(directory: Path, lengths: list[int]) -> Extraction:
    rows = [{"id": f"row-{i}", "input_ids": [1 + i, *range(1, n)]} for i, n in enumerate(lengths)]
    chats = directory / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama"))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(chats), "processes": 1},
            "chunk_tokens": 64,
            "store": str(directory / "store"),
            "engine": {
                "max_model_len": 64,
                "max_num_batched_tokens": 64,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.1,
                "in_process": True,
                "staging_gib": 0.1,
                "writer_threads": 1,
            },
        }
    )


def run(wanted: Extraction, deployment: str, **knobs: Any) -> tuple[Any, FleetSummary]:
    state: Any = extract_fleet(wanted, deployment, return_state=True, **knobs)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, FleetSummary), summary
    return state, summary


@pytest.mark.engine
def test_a_killed_node_s_chunks_are_finished_by_the_other(prefect_server: str, tmp_path: Path) -> None:
    script, log = tmp_path / "script", tmp_path / "commits"
    script.write_text("shard-001 2 node")
    log.touch()
    deployment = deploy("two-nodes", "tests/flows/dying.py:extract")
    wanted = extraction(tmp_path, LENGTHS)
    nodes = {"node-a": pinned(CORES[0]), "node-b": pinned(CORES[-1])}
    variables = {dying.SCRIPT: str(script), dying.LOG: str(log)}
    with workers(prefect_server, "two-nodes", nodes, tmp_path, **variables):
        state, summary = run(wanted, deployment, nodes=2, silence_seconds=60)
        assert state.is_completed(), summary.lines()
        assert state.message == "40 extracted, 0 reused, 2/2 shards completed, 1 issued again"
        first, second = summary.shards
        assert (len(first.runs), len(second.runs)) == (1, 2)
        lines = [line.split() for line in log.read_text().splitlines()]
        assert {key for _, _, key in lines} == set(open_store(wanted.store).keys)
        assert max(Counter(key for _, _, key in lines).values()) == 1, "nothing is committed twice"
        by_process = list(Counter(pid for share, pid, _ in lines if share == "shard-001").values())
        assert len(by_process) == 2
        before, after = by_process
        assert second.message == f"{after} extracted, {before} reused", "what was committed is not extracted again"

        found = verify(wanted.store)
        assert (found.ok, found.samples, found.unrecorded, found.leftovers) == (True, len(LENGTHS), [], [])
        reader = open_store(wanted.store)
        assert len(reader.source_ids) == len(LENGTHS)

        again, summary = run(wanted, deployment, nodes=2)
        assert again.message == "0 extracted, 40 reused, 0/0 shards completed"


def test_a_fleet_waits_for_no_store_that_another_run_fills(prefect_server: str, tmp_path: Path) -> None:
    from tasks.model import resolve

    wanted = extraction(tmp_path, LENGTHS[:2])
    identity = wanted.identity(resolve(wanted.model))
    with Store.open(wanted.store, identity, run="left-over", share=Share("earlier", "shard-000")):
        state: Any = extract_fleet(wanted, "extract/none", return_state=True)
    assert state.is_failed()
    assert "being written by run left-over of earlier" in state.message


def test_a_deployment_s_own_defaults_do_not_change_a_shard(tmp_path: Path) -> None:
    given = shard_parameters(extraction(tmp_path, LENGTHS[:1]), only_failed=True)
    assert {*given, "shard"} == set(extract.parameters.properties)
