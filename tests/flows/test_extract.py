"""The flow through the real engine: what is extracted, what is reused, and what a person is told."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

from flows.config import Extraction
from flows.extract import extract
from tasks.report.summary import Summary
from tasks.store import open as open_store
from tests.checkpoints import checkpoint_path
from tests.flows import faults

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]

LENGTHS = (40, 33, 1, 17, 25, 9)
ROWS: list[dict[str, Any]] = [
    {"id": f"row/../{n}", "input_ids": list(range(1, n + 1)), "loss_mask": [(i + 1) % 2 for i in range(n)]}
    for n in LENGTHS
]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def extraction(directory: Path, rows: list[Any] = ROWS, **data: Any) -> Extraction:
    return Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama"))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(write(directory / "chats.jsonl", rows)), "processes": 1} | data,
            "chunk_tokens": 64,
            "store": str(directory / "store"),
            "engine": {
                "max_model_len": 64,
                "max_num_batched_tokens": 32,
                "max_num_seqs": 8,
                "kv_cache_gib": 0.1,
                "in_process": True,
                "staging_gib": 0.1,
                "writer_threads": 1,
            },
        }
    )


def run(wanted: Extraction) -> tuple[Any, Summary]:
    state: Any = extract(wanted, return_state=True)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    return state, summary


def chunk_states(state: Any, chunks: int) -> dict[str, tuple[str, str]]:
    """Task run name -> (state, message) of the chunks of a flow run, once the server has recorded them all."""
    this_run = FlowRunFilter(id=FlowRunFilterId(any_=[state.state_details.flow_run_id]))
    deadline = time.monotonic() + 60
    with get_client(sync_client=True) as client:
        while True:
            runs = [r for r in client.read_task_runs(flow_run_filter=this_run) if r.name.startswith("extract ")]
            ended = {r.name: (r.state.name, r.state.message or "") for r in runs if r.state and r.state.is_final()}
            if len(ended) == chunks or time.monotonic() > deadline:
                return ended
            time.sleep(0.2)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Extraction, Any, Summary]:
    """A finished extraction."""
    directory = tmp_path_factory.mktemp("done")
    wanted = extraction(directory)
    return directory, wanted, *run(wanted)


def test_everything_asked_for_is_in_the_store(done: tuple[Path, Extraction, Any, Summary]) -> None:
    directory, _, state, summary = done
    assert state.is_completed()
    assert (summary.extracted, summary.reused, summary.engine_started) == (len(LENGTHS), 0, True)
    reader = open_store(directory / "store")
    assert len(reader) == len(LENGTHS)
    for row in ROWS:
        sample = reader[row["id"]]
        assert sample.depths == (1, 3, 5, 6)
        assert sample.hidden_states.shape == (4, len(row["input_ids"]), 256)
        assert sample.input_ids.tolist() == row["input_ids"]
        assert sample.loss_mask.tolist() == [bool(x) for x in row["loss_mask"]]


def test_a_rerun_extracts_nothing_and_starts_no_engine(done: tuple[Path, Extraction, Any, Summary]) -> None:
    state, summary = run(done[1])
    assert state.is_completed()
    assert (summary.extracted, summary.reused, summary.engine_started) == (0, len(LENGTHS), False)
    states = chunk_states(state, 3)
    assert len(states) == 3
    assert {name for name, _ in states.values()} == {"Cached"}
    assert sorted(message for _, message in states.values()) == [
        "1/1 verified in store",
        "2/2 verified in store",
        "3/3 verified in store",
    ]


@pytest.mark.parametrize("damage", ["directory", "file"])
def test_exactly_the_damaged_sample_is_extracted_again(
    done: tuple[Path, Extraction, Any, Summary], damage: str
) -> None:
    directory, wanted, *_ = done
    reader = open_store(directory / "store")
    before = {key: reader[key].hidden_states.clone() for key in reader.keys}
    key = reader.key_of(ROWS[3]["id"])
    sample = directory / "store" / "samples" / key[:2] / key
    if damage == "directory":
        shutil.rmtree(sample)
    else:
        states = max((p for p in sample.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        with states.open("r+b") as file:
            file.truncate(states.stat().st_size - 1)
    state, summary = run(wanted)
    assert state.is_completed()
    assert (summary.extracted, summary.reused, summary.tokens) == (1, len(LENGTHS) - 1, LENGTHS[3])
    reader = open_store(directory / "store")
    assert {k: reader[k].hidden_states.equal(before[k]) for k in before} == dict.fromkeys(before, True)


def test_a_sample_that_fails_is_quarantined_and_the_rest_is_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.extract.task.STAGE", f"{faults.__name__}:stage")
    monkeypatch.setenv(faults.LENGTHS, "33,9")
    wanted = extraction(tmp_path)
    state, summary = run(wanted)
    assert state.is_failed()
    assert state.message == "4 extracted, 0 reused, 2 quarantined"
    assert {v.reason for v in summary.quarantined} == {"capture"}
    assert all("scripted" in v.detail for v in summary.quarantined)
    reader = open_store(tmp_path / "store")
    assert sorted(listed.num_tokens for listed in reader.listing()) == [1, 17, 25, 40]
    assert sorted(s for q in reader.quarantined() for s in q["sources"]) == ["row/../33", "row/../9"]

    monkeypatch.setenv(faults.LENGTHS, "")
    state, summary = run(wanted)
    assert state.is_completed()
    assert (summary.extracted, summary.reused) == (2, 4)
    assert not list(open_store(tmp_path / "store").quarantined())


def test_a_full_disk_fails_its_chunk_and_judges_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.extract.task.STAGE", f"{faults.__name__}:stage")
    monkeypatch.setenv(faults.FULL, "17")
    wanted = extraction(tmp_path)
    state, summary = run(wanted)
    assert state.is_failed()
    assert len(summary.failed_chunks) == 1
    (why,) = summary.failed_chunks.values()
    assert "the disk is full; free space and run again" in why
    assert not summary.quarantined
    stored = sorted(listed.num_tokens for listed in open_store(tmp_path / "store").listing())
    assert 17 not in stored
    assert len(stored) == summary.extracted > 0

    monkeypatch.setenv(faults.FULL, "")
    state, summary = run(wanted)
    assert state.is_completed()
    assert summary.extracted + summary.reused == len(LENGTHS)
    assert summary.reused == len(stored)


def test_bad_rows_are_counted_and_do_not_stop_the_run(tmp_path: Path) -> None:
    renamed = {"id": "again"}
    rows = [ROWS[0] | renamed, ROWS[4], "not json", {"id": "empty", "input_ids": []}, ROWS[4] | renamed]
    state, summary = run(extraction(tmp_path, rows))
    assert state.is_completed()
    assert (summary.extracted, summary.skipped, summary.input.duplicates) == (2, 2, 1)
    assert dict(summary.lines())["skipped"] == "2 input rows: 1 json, 1 empty"
    reader = open_store(tmp_path / "store")
    assert reader.key_of("again") == reader.key_of(ROWS[4]["id"]), "the later row of the two with this id"


def test_data_of_which_nothing_can_be_used_fails_the_run(tmp_path: Path) -> None:
    state: Any = extract(extraction(tmp_path, ["not json"]), return_state=True)
    assert state.is_failed()
    assert "none of the 1 rows of" in state.message


def test_on_error_fail_stops_at_the_first_bad_row(tmp_path: Path) -> None:
    state: Any = extract(extraction(tmp_path, [ROWS[0], "not json"], on_error="fail"), return_state=True)
    assert state.is_failed()
    assert "chats.jsonl:2" in state.message


def test_another_extraction_is_refused_before_the_engine_starts(
    done: tuple[Path, Extraction, Any, Summary],
) -> None:
    other = done[1].model_copy(update={"dtype": "bfloat16"})
    state: Any = extract(other, return_state=True)
    assert state.is_failed()
    assert "dtype: the store has 'float32', this run 'bfloat16'" in state.message
