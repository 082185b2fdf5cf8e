"""Which sample an id names where rows of different content have it: that of the last row, however often it is run."""

from pathlib import Path

import pytest

from flows.node import Parcel
from tasks.plan.task import plan_chunks
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.store import Store
from tasks.store import open as open_store
from tasks.store.task import commit_chunk, record_reused
from tasks.vocabulary import Receipt, Verdict
from tests.store.samples import Made, identity, make, stage

# The last row is the longest, with which its chunk begins.
FIRST, ALONE, LAST = (make(identity(), n) for n in (5, 7, 9))


@pytest.fixture
def table(tmp_path: Path) -> SampleTable:
    rows = [("a", FIRST), ("b", ALONE), ("c", FIRST), ("a", LAST)]
    with SampleTableWriter(tmp_path / "samples.arrow") as writer:
        writer.add(Sample(name, made.key, made.input_ids, made.loss_mask) for name, made in rows)
    return SampleTable(tmp_path / "samples.arrow")


def accepted(store: Store, made: Made) -> Verdict:
    objects = stage(store, made).objects
    receipt = Receipt(made.key, 0, 1, (), "bfloat16", "", (), (), (), (), objects=objects, next_token=1)
    return Verdict(made.key, True, receipts=[receipt])


def named(url: Path) -> dict[str, str]:
    reader = open_store(url)
    return {name: reader.key_of(name) for name in reader.source_ids}


def test_an_id_names_the_last_row_with_it_after_a_run_and_after_each_rerun(table: SampleTable, tmp_path: Path) -> None:
    url = tmp_path / "store"
    expected = {"a": LAST.key, "b": ALONE.key, "c": FIRST.key}
    with Store.open(url, identity()) as store:
        (chunk,) = plan_chunks.fn(table, store, 100)
        outcome = commit_chunk.fn(chunk, [accepted(store, made) for made in (LAST, ALONE, FIRST)], table, store)
        assert outcome.extracted == 3
    assert named(url) == expected
    for _ in range(2):
        with Store.open(url, identity()) as store:
            assert record_reused(plan_chunks.fn(table, store, 100), table, store) == 3
        assert named(url) == expected


def test_a_node_is_told_which_rows_have_lost_their_ids(table: SampleTable, tmp_path: Path) -> None:
    with Store.open(tmp_path / "store", identity()) as store:
        (chunk,) = plan_chunks.fn(table, store, 100)
    parcel = Parcel.pack(chunk, table)
    assert [parcel.samples[row].source_id for row in parcel.nameless] == ["a"]
    (row,) = parcel.nameless
    assert parcel.samples[row].key == FIRST.key
