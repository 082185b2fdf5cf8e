"""The plan of a run: a shard's keys, or what the last run left."""

from pathlib import Path

import pytest

from tasks.plan.chunks import distinct
from tasks.plan.shards import cut
from tasks.plan.task import plan_chunks
from tasks.report.summary import Summary
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.store import Store
from tasks.store.task import note_failed
from tasks.vocabulary import Chunk, Verdict
from tests.store.samples import Made, fill, identity, make

MADE = [make(identity(), n, seed=n) for n in range(3, 15)]
CHUNK_TOKENS = 20


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    path = tmp_path / "samples.arrow"
    with SampleTableWriter(path) as writer:
        writer.add(Sample(f"row-{i}", s.key, s.input_ids, s.loss_mask) for i, s in enumerate(MADE))
    return SampleTable(path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "store", identity())


def keys(chunks: list[Chunk]) -> list[str]:
    return sorted(sample.key for chunk in chunks for sample in chunk.samples)


def missing(chunks: list[Chunk]) -> list[str]:
    return sorted(sample.key for chunk in chunks for sample in chunk.missing)


def test_shards_plan_every_key_once(table: SampleTable, store: Store) -> None:
    shards = cut("fleet", distinct(table.keys, table.num_tokens), 3)
    assert len(shards) == 3
    plans = [plan_chunks.fn(table, store, CHUNK_TOKENS, shard=shard) for shard in shards]
    assert sorted(key for plan in plans for key in keys(plan)) == sorted(table.keys)
    store.close()


def test_only_what_the_last_run_left_is_planned(table: SampleTable, store: Store, tmp_path: Path) -> None:
    chunks = plan_chunks.fn(table, store, CHUNK_TOKENS)
    lost, kept = chunks[1], {s.key for c in chunks for s in c.samples} - {s.key for s in chunks[1].samples}
    refused: Made = next(s for s in MADE if s.key in kept)
    done = [s for s in MADE if s.key in kept - {refused.key}]
    fill(store, done)
    store.quarantine(refused.key, ["a source"], "shape", "")
    summary = Summary(store="", quarantined=[Verdict(refused.key, False, "shape")], failed_chunks={lost.name: "disk"})
    note_failed(chunks, summary, store)
    store.close()

    expected = sorted([refused.key, *(s.key for s in lost.samples)])
    with Store.open(tmp_path / "store", identity()) as later:
        again = plan_chunks.fn(table, later, CHUNK_TOKENS, only_failed=True)
        assert keys(again) == missing(again) == expected
        fill(later, [s for s in MADE if s.key in expected], prefix="later")
        note_failed(again, Summary(store=""), later)
        assert plan_chunks.fn(table, later, CHUNK_TOKENS, only_failed=True) == []
        assert missing(plan_chunks.fn(table, later, CHUNK_TOKENS)) == []
