"""A large clean extraction, its audit, and what a browser shows of both in the Prefect UI."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterKey

from flows.audit import audit
from flows.config import Extraction
from flows.extract import extract
from tasks.report.summary import Summary
from tasks.store import open as open_store
from tasks.verify.audit import AuditReport
from tests.browser import browser
from tests.checkpoints import checkpoint_path

pytestmark = pytest.mark.engine

SAMPLES = 1000
OUTPUT = Path(__file__).parent.parent / "output"


@pytest.fixture(scope="module")
def clean(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Summary]:
    """A store of 1,000 samples of random tokens, 1 to 40 long."""
    directory = tmp_path_factory.mktemp("clean")
    generator = random.Random(0)
    rows = [
        {"id": f"row-{i}", "input_ids": generator.choices(range(256), k=generator.randint(1, 40)), "loss_mask": None}
        for i in range(SAMPLES)
    ]
    rows = [row | {"loss_mask": [1] * len(row["input_ids"])} for row in rows]
    chats = directory / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama"))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(chats), "processes": 1},
            "chunk_tokens": 8192,
            "store": str(directory / "store"),
            "engine": {
                "max_model_len": 128,
                "max_num_batched_tokens": 512,
                "max_num_seqs": 64,
                "kv_cache_gib": 0.2,
                "in_process": True,
                "staging_gib": 0.2,
                "writer_threads": 1,
            },
        }
    )
    state: Any = extract(wanted, return_state=True)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    return directory / "store", summary


def test_no_clean_sample_is_quarantined(clean: tuple[Path, Summary]) -> None:
    path, summary = clean
    assert summary.quarantined == []
    assert summary.retried == 0
    assert summary.extracted + summary.input.duplicates + summary.skipped == SAMPLES
    assert summary.extracted > 0.95 * SAMPLES
    assert len(open_store(path)) == summary.extracted
    print(f"{summary.extracted} clean samples, {len(summary.quarantined)} quarantined")


def audited(store: Path, page: Path, reference: str, samples: int) -> AuditReport:
    state: Any = audit(str(store), reference=reference, samples=samples, html=page, return_state=True)
    report = state.result(raise_on_failure=False)
    assert isinstance(report, AuditReport), report
    assert state.is_completed() is report.passed
    assert f"error against {reference}" in page.read_text()
    return report


@pytest.fixture(scope="module")
def by_hugging_face(clean: tuple[Path, Summary], tmp_path_factory: pytest.TempPathFactory) -> tuple[AuditReport, Path]:
    page = tmp_path_factory.mktemp("audit") / "audit.html"
    return audited(clean[0], page, "hf", 20), page


def test_the_audit_passes_by_hugging_face(
    clean: tuple[Path, Summary], by_hugging_face: tuple[AuditReport, Path]
) -> None:
    report, _ = by_hugging_face
    assert report.passed
    assert report.proofs("failed") == 0
    assert report.proofs("proved") + report.proofs("near tie") == clean[1].extracted
    assert sum(bool(sample.parity) for sample in report.samples) == 20


def test_the_audit_passes_one_sample_at_a_time(clean: tuple[Path, Summary], tmp_path: Path) -> None:
    report = audited(clean[0], tmp_path / "audit.html", "solo", 5)
    assert report.passed
    assert sum(bool(sample.parity) for sample in report.samples) == 5


def artifacts(prefix: str) -> list[Any]:
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter(key=ArtifactFilterKey(like_=prefix)))
    return sorted((a for a in found if str(a.key).startswith(prefix)), key=lambda artifact: str(artifact.key))


def test_a_chunk_s_table_is_small_and_has_a_total(clean: tuple[Path, Summary], prefect_server: str) -> None:
    tables = artifacts("shape-audit-chunk-")
    assert len(tables) == len({table.key for table in tables}) == 3
    assert all(table.task_run_id is not None for table in tables)
    for table in tables:
        rows = json.loads(table.data)
        assert len(rows) <= 201
        assert rows[0]["sample"].startswith("total ")
        assert set(rows[1]) == {
            *("sample", "source", "expected", "shape", "dtype", "RMS"),
            *("finite", "TP agreement", "reused", "proof", "action"),
        }
        assert rows[1]["shape"] == rows[1]["expected"]
    assert sum(int(json.loads(table.data)[0]["sample"].split()[1]) for table in tables) == clean[1].extracted


def test_a_browser_shows_the_table_the_summary_and_the_picture(
    clean: tuple[Path, Summary], prefect_server: str, tmp_path: Path
) -> None:
    """In the UI of the server itself, since what an artifact holds and what is shown of it are two things."""
    table = artifacts("shape-audit-chunk-")[0]
    (summary,), (picture,) = artifacts("extraction-summary"), artifacts("state-sizes")
    row = json.loads(table.data)[1]
    with browser(tmp_path) as page:
        page.open(f"{prefect_server}/artifacts/artifact/{table.id}")
        for text in ("TP agreement", row["sample"], row["RMS"], row["expected"]):
            page.wait_for(f"document.body.innerText.includes({json.dumps(text)})")
        page.screenshot(OUTPUT / "ui-table.png")
        page.open(f"{prefect_server}/artifacts/artifact/{summary.id}")
        page.wait_for(f"document.body.innerText.includes('{clean[1].extracted} extracted')")
        page.screenshot(OUTPUT / "ui-summary.png")
        page.open(f"{prefect_server}/artifacts/artifact/{picture.id}")
        page.wait_for("[...document.images].some(i => i.src.startsWith('data:image/png') && i.naturalWidth > 600)")
        page.screenshot(OUTPUT / "ui-picture.png")


def test_a_browser_opens_the_report_offline(by_hugging_face: tuple[AuditReport, Path], tmp_path: Path) -> None:
    with browser(tmp_path) as page:
        page.open(by_hugging_face[1].as_uri())
        page.wait_for("document.body.innerText.includes('passed')")
        page.wait_for("document.images.length === 1 && document.images[0].naturalWidth > 600")
        page.wait_for("document.querySelectorAll('tr').length > 500")
        assert (
            page.evaluate("performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length") == 0
        )
        page.screenshot(OUTPUT / "audit.png")
