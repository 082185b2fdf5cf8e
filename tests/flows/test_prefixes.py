"""Samples that begin alike, through the whole flow: computed once, stored once, and audited as all others."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey
from prefect.client.schemas.sorting import ArtifactSort

from flows.audit import audit
from flows.config import Extraction
from flows.extract import extract
from tasks.report.summary import Summary
from tasks.store import open as open_store
from tasks.store.maintenance import stats, verify
from tasks.verify.audit import AuditReport
from tests.checkpoints import checkpoint_path

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]

PREFIX = 600
FAMILIES, MEMBERS = 2, 4


@pytest.fixture(scope="module")
def done(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary, str]:
    """A store of two families that share a chunk, mixed up in the input, and a sample of its own."""
    directory = tmp_path_factory.mktemp("prefixes")
    generator = random.Random(0)
    prefixes = [generator.choices(range(256), k=PREFIX) for _ in range(FAMILIES)]
    rows = [
        {"id": f"{family}-{member}", "input_ids": prefixes[family] + generator.choices(range(256), k=20 + member)}
        for member in range(MEMBERS)
        for family in range(FAMILIES)
    ]
    rows.append({"id": "alone", "input_ids": generator.choices(range(256), k=90)})
    (directory / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama"))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(directory / "chats.jsonl"), "processes": 1},
            "chunk_tokens": 3000,
            "store": str(directory / "store"),
            "engine": {
                "max_model_len": 1024,
                "max_num_batched_tokens": 256,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.1,
                "in_process": True,
                "staging_gib": 0.1,
                "writer_threads": 2,
                "extra": {"block_size": 32},
            },
        }
    )
    state: Any = extract(wanted, return_state=True)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    return directory / "store", summary, str(state.state_details.flow_run_id)


def test_a_prefix_is_computed_once(done: tuple[Path, Summary, str]) -> None:
    _, summary, _ = done
    assert summary.complete
    assert summary.retried == 0
    known = FAMILIES * (MEMBERS - 1) * (PREFIX // 32 * 32)
    assert summary.reused_rows == known
    assert ("prefixes", f"{known:,} rows reused, {known / summary.tokens:.0%}") in summary.lines()


def test_a_prefix_is_stored_once(done: tuple[Path, Summary, str]) -> None:
    store, _, _ = done
    found = stats(store)
    assert found.disk_bytes < 0.5 * found.stored_bytes
    assert verify(store).ok


def test_the_table_says_from_where(done: tuple[Path, Summary, str]) -> None:
    store, summary, _ = done
    with get_client(sync_client=True) as client:
        audits = ArtifactFilter(key=ArtifactFilterKey(like_="shape-audit-chunk-"))
        tables = client.read_artifacts(artifact_filter=audits, sort=ArtifactSort.CREATED_DESC)
    rows = [row for table in tables for row in json.loads(table.data) if " rows of " in row.get("reused", "")]
    keys = {key[:12] for key in open_store(store).keys}
    ours = [row for row in rows if row["sample"] in keys]
    assert len(ours) == FAMILIES * (MEMBERS - 1)
    assert all(row["reused"].split()[-1] in keys for row in ours)
    assert sum(int(row["reused"].split()[0]) for row in ours) == summary.reused_rows


def test_each_alone_is_the_same(done: tuple[Path, Summary, str], tmp_path: Path) -> None:
    store, _, _ = done
    page = tmp_path / "audit.html"
    state: Any = audit(str(store), reference="solo", samples=6, html=page, return_state=True)
    report = state.result(raise_on_failure=False)
    assert isinstance(report, AuditReport), report
    assert report.passed
    assert sum(bool(sample.parity) and bool(sample.reused) for sample in report.samples) >= 3
    assert " rows of " in page.read_text()
