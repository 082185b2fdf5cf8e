"""Two nodes of a Ray cluster fill one store; the chunks of the one that is killed go to the other."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from flows.ray_fleet import extract_ray
from tasks.report.summary import Summary
from tasks.store import open as open_store
from tasks.store.maintenance import verify
from tests.flows import dying
from tests.flows.test_fleet import LENGTHS, extraction


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A head and two nodes with a CPU each, whose processes read the script of faults."""
    monkeypatch.setenv(dying.SCRIPT, str(tmp_path / "script"))
    monkeypatch.setenv(dying.LOG, str(tmp_path / "commits"))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("flows.ray_fleet.Node", dying.DyingNode)
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        for _ in range(2):
            made.add_node(num_cpus=1, object_store_memory=80 << 20)
        ray.init(address=made.address, log_to_driver=False, include_dashboard=False)
        yield
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.mark.engine
@pytest.mark.usefixtures("cluster")
def test_chunks_of_a_killed_node_go_to_the_other(prefect_server: str, tmp_path: Path) -> None:
    (tmp_path / "script").write_text("shard-001 2 process")
    log = tmp_path / "commits"
    log.touch()
    wanted = extraction(tmp_path, LENGTHS)
    state: Any = extract_ray(wanted, return_state=True)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    assert state.is_completed(), summary.lines()
    assert (summary.extracted, summary.reused, summary.failed_chunks) == (len(LENGTHS), 0, {})
    assert not (tmp_path / "script").exists(), "the node was killed"

    lines = [line.split() for line in log.read_text().splitlines()]
    assert max(Counter(key for _, _, key in lines).values()) == 1, "nothing is committed twice"
    assert {key for _, _, key in lines} == set(open_store(wanted.store).keys)
    assert len({pid for _, pid, _ in lines}) == 2
    found = verify(wanted.store)
    assert (found.ok, found.samples, found.unrecorded, found.leftovers) == (True, len(LENGTHS), [], [])
    assert len(open_store(wanted.store).source_ids) == len(LENGTHS)

    again: Any = extract_ray(wanted, return_state=True)
    assert again.message == f"0 extracted, {len(LENGTHS)} reused"
