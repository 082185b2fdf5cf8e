"""Every way in which captures are known to go wrong, through the whole flow, with one and with two ranks.

One extraction carries all faults, each in a sample of its own length, among clean samples. A fault is caught if its
sample is not in the store, and is listed with the reason that names it.
"""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from flows.config import Extraction
from flows.extract import extract
from tasks.report.summary import Summary
from tasks.store import open as open_store
from tests.checkpoints import checkpoint_path

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("prefect_server")]

STEP = 64  # tokens of an engine step

# By name, since tests.flows.faulty imports vLLM's worker, which only the engine's process should do.
SCRIPT = "LAYERTAP_TEST_FAULTS"
WORKER = "tests.flows.faulty.FaultyWorker"
STAGE = "tests.flows.faulty:stage"

#: fault -> the check that catches it with one rank, and with two
FAULTS: dict[str, tuple[str, str]] = {
    "rows of one request under another": ("token_ids", "token_ids"),
    "rows of one request under another's tokens": ("witness", "witness"),
    "one layer too deep": ("witness", "witness"),
    "one layer too shallow": ("witness", "witness"),
    "residual not added": ("witness", "witness"),
    "partial sums of one rank": ("witness", "agreement"),
    "token-sharded states": ("shape", "shape"),
    "cached prefix rows missing": ("capture", "capture"),
    "rows of padding": ("zero_rows", "zero_rows"),
    "rows of padding that repeat": ("repeated_rows", "repeated_rows"),
    "static buffer overwritten by the next step": ("arrival", "arrival"),
    "zeros from an unwritten block": ("arrival", "arrival"),
    "rows never written": ("written", "written"),
    "NaN from the capture": ("finite", "finite"),
    "NaN from the model": ("model_finite", "model_finite"),
    "a layer less": ("shape", "shape"),
    "last layer dropped": ("distinct_depths", "distinct_depths"),
    "final norm applied": ("witness", "witness"),
    "one capture per prefill chunk": ("capture", "capture"),
    "hidden axis lost": ("shape", "shape"),
    "another element type": ("dtype", "dtype"),
    "one bit of one rank": ("", "agreement"),  # of a single rank there is no other to disagree
    "one bit on the way": ("arrival", "arrival"),
    "rows shifted by one": ("witness", "witness"),
    "two depths exchanged": ("witness", "witness"),
    "rows carried to the next depth": ("distinct_depths", "distinct_depths"),
    "states of another prompt's end": ("next_token", "next_token"),
    "numbers far too large": ("usual_size", "usual_size"),
    "disk full": ("capture", "capture"),
    "no receipt from a rank": ("ranks", "ranks"),
}
TRANSIENT = "one bit of one rank once"
LENGTHS = {name: 9 + i for i, name in enumerate(FAULTS)} | {"one capture per prefill chunk": STEP + 11}
CLEAN = (1, 2, 5, *range(42, 64))


@pytest.mark.parametrize("size", [1, 2], ids=["tp1", "tp2"])
def test_all_faults_are_caught(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = {LENGTHS[name]: name for name, reasons in FAULTS.items() if reasons[size - 1]}
    faults |= {len(FAULTS) + 10: TRANSIENT} if size > 1 else {}
    monkeypatch.setenv(SCRIPT, json.dumps(faults))
    monkeypatch.setitem(__import__("tasks.extract.engine", fromlist=["WORKERS"]).WORKERS, "cpu", WORKER)
    monkeypatch.setattr("tasks.extract.task.STAGE", STAGE)
    lengths = [*CLEAN, *faults]
    summary, state = run(tmp_path, lengths, size)

    reader = open_store(tmp_path / "store")
    stored = {listed.num_tokens for listed in reader.listing()}
    records = {int(q["sources"][0].split("-")[1]): q for q in reader.quarantined()}
    lines = []
    for length, name in faults.items():
        expected = FAULTS[name][size - 1] if name in FAULTS else None
        found = records.get(length)
        caught = found is not None and length not in stored and found["reason"] == expected
        if name == TRANSIENT:
            caught = found is None and length in stored
        by = found["reason"] if found else "retried alone and accepted" if name == TRANSIENT else "-"
        lines.append((name, by, "yes" if caught else "no", found["detail"] if found else ""))
    table = [f"{'fault':<46}{'caught by':<28}caught, TP={size}"]
    table += [f"{name:<46}{by:<28}{caught}" for name, by, caught, _ in lines]
    with capsys.disabled():
        print("\n" + "\n".join(table))
    output = Path(__file__).parent.parent / "output"
    output.mkdir(exist_ok=True)
    (output / f"faults-tp{size}.txt").write_text("\n".join(f"{name}: {by}: {detail}" for name, by, _, detail in lines))

    assert [line for line in lines if line[2] != "yes"] == []
    clean = set(CLEAN) | ({len(FAULTS) + 10} if size > 1 else set())
    assert stored == clean, "no clean sample is lost, not even one that shared a step with a faulty one"
    assert state.is_failed()
    assert {v.key for v in summary.quarantined} == {q["key"] for q in reader.quarantined()}
    for record in records.values():
        assert "first attempt" in record["detail"], "each was retried alone once"
        assert len(json.dumps(record)) < 20_000, "the evidence is small"
    by_name = {name: detail for name, _, _, detail in lines}
    assert "sequence parallelism" in by_name["token-sharded states"] or size == 1
    assert "a layer is missing: 3 = 4 - 1" in by_name["a layer less"]
    assert "prefix caching" in by_name["cached prefix rows missing"]
    if size == 2:
        assert "max abs" in by_name["partial sums of one rank"]
        assert "rank 1 against the others" in by_name["one bit of one rank"]
        assert "1 rows from row 2" in by_name["one bit of one rank"]


def test_a_broken_kernel_stops_the_run_at_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [20, 21, 22, *range(42, 52)]
    monkeypatch.setenv(SCRIPT, json.dumps(dict.fromkeys(lengths, "NaN from the model")))
    monkeypatch.setitem(__import__("tasks.extract.engine", fromlist=["WORKERS"]).WORKERS, "cpu", WORKER)
    summary, state = run(tmp_path, lengths, 1, chunk_tokens=64, stop_share=0.5)
    assert state.is_failed()
    assert {v.reason for v in summary.quarantined} == {"model_finite"}
    assert len(summary.quarantined) == 3, "those of the first chunk, and no sample of a second"
    assert summary.halted is not None
    assert "3 of 3 samples up to chunk-0000" in summary.halted
    assert "Look at the engine's kernels" in summary.halted
    assert all("model itself computed NaN" in why for why in summary.failed_chunks.values())
    assert not len(open_store(tmp_path / "store"))


def test_what_the_model_goes_on_with_is_told_and_kept(tmp_path: Path) -> None:
    summary, _ = run(tmp_path, [9, 10], 1)
    (record,) = open_store(tmp_path / "store").runs()
    assert summary.continuation.text
    assert record["started"]["probe"] == str(summary.continuation)
    assert record["started"]["engine"]["max_num_batched_tokens"] == STEP
    assert ("the model goes on", str(summary.continuation)) in summary.lines()


def run(directory: Path, lengths: list[int], size: int, chunk_tokens: int = 8192, **audit: Any) -> tuple[Summary, Any]:
    """Extract samples of random tokens of these lengths."""
    generator = random.Random(0)
    rows = [{"id": f"row-{n}-{i}", "input_ids": generator.choices(range(256), k=n)} for i, n in enumerate(lengths)]
    chats = directory / "chats.jsonl"
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = Extraction.model_validate(
        {
            "model": {"path": str(checkpoint_path("llama", size))},
            "layers": {"ids": [0, 2, 4, 5], "convention": "output"},
            "dtype": "float32",
            "data": {"path": str(chats), "processes": 1},
            "chunk_tokens": chunk_tokens,  # by default one, which then has enough clean samples to learn from
            "store": str(directory / "store"),
            "engine": {
                "tensor_parallel_size": size,
                "max_model_len": 128,
                "max_num_batched_tokens": STEP,
                "max_num_seqs": 16,
                "kv_cache_gib": 0.1,
                "in_process": size == 1,
                "staging_gib": 0.1,
                "writer_threads": 1,
            },
            "audit": {"stop_share": 1.0, **audit},
        }
    )
    state: Any = extract(wanted, return_state=True)
    summary = state.result(raise_on_failure=False)
    assert isinstance(summary, Summary), summary
    return summary, state
