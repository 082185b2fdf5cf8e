"""Samples that begin alike stand together; nothing else of them changes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.plan.chunks import split
from tasks.plan.prefixes import BLOCK, arrange, known_share, reuses_prefixes
from tasks.plan.task import plan_chunks
from tasks.prefixes import prefix_names
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.vocabulary import Chunk, PlannedSample

#: A sample as a path of blocks, and tokens behind the last whole one.
PATHS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=4), st.integers(1, BLOCK - 1)), max_size=25)


def ids(path: tuple[list[int], int]) -> np.ndarray:
    blocks, rest = path
    return np.array([b for block in blocks for b in [block] * BLOCK] + [7] * rest, np.int32)


def arranged(paths: list[tuple[list[int], int]]) -> list[PlannedSample]:
    samples = [PlannedSample(f"{i:04x}", len(ids(p)), (i,)) for i, p in enumerate(paths)]
    return arrange(samples, lambda sample: ids(paths[sample.rows[0]]))


def common_blocks(a: tuple[list[int], int], b: tuple[list[int], int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a[0], b[0], strict=False)) if x != y), min(len(a[0]), len(b[0])))


@given(PATHS)
def test_all_samples_with_a_prefix_stand_together(paths: list[tuple[list[int], int]]) -> None:
    order = [sample.rows[0] for sample in arranged(paths)]
    assert sorted(order) == [*range(len(paths))]
    for length in range(1, 5):
        prefixes = [tuple(paths[i][0][:length]) for i in order if len(paths[i][0]) >= length]
        runs = [p for p, before in zip(prefixes, [None, *prefixes], strict=False) if p != before]
        assert len(runs) == len(set(runs)), "each prefix is one run"


@given(PATHS)
def test_a_sample_knows_what_it_shares(paths: list[tuple[list[int], int]]) -> None:
    before: PlannedSample | None = None
    for sample in arranged(paths):
        path = paths[sample.rows[0]]
        if before is not None:
            assert sample.like_previous == BLOCK * common_blocks(path, paths[before.rows[0]])
        most = max((common_blocks(path, other) for i, other in enumerate(paths) if i != sample.rows[0]), default=0)
        assert sample.shared == min(sample.num_tokens, (most + 1) * BLOCK)
        before = sample


@given(PATHS, st.integers(1, 2000))
def test_arranged_samples_stay_in_order_and_each_is_in_one_chunk(
    paths: list[tuple[list[int], int]], budget: int
) -> None:
    samples = arranged(paths)
    chunks = split(samples, budget, in_order=True)
    assert [s for chunk in chunks for s in chunk.samples] == samples
    for chunk in chunks:
        assert chunk.num_tokens <= budget or len(chunk.samples) == 1


def test_families_come_in_the_order_of_the_input() -> None:
    paths = [([1, 1], 5), ([2], 5), ([1, 2], 5), ([], 5), ([2], 6), ([1, 1], 6)]
    assert [sample.rows[0] for sample in arranged(paths)] == [0, 5, 2, 1, 4, 3]


def test_a_border_does_not_split_a_family_that_would_fit() -> None:
    paths = [([1], 3), ([1], 5), ([2], 1), ([2], 2), ([2], 3)]
    chunks = split(arranged(paths), 4 * (BLOCK + 3), in_order=True)
    assert [[s.rows[0] for s in chunk.samples] for chunk in chunks] == [[0, 1], [2, 3, 4]]


def test_the_share_counts_missing_samples_only() -> None:
    one, two, three = arranged([([1, 1], 1), ([1, 1], 2), ([1, 2], 3)])
    every = Chunk("c", (one, two, three), (one, two, three))
    assert known_share([every]) == pytest.approx((2 * BLOCK + BLOCK) / (6 * BLOCK + 6))
    assert known_share([Chunk("c", (one, two, three), (one, three))]) == pytest.approx(BLOCK / (4 * BLOCK + 4))
    assert known_share([Chunk("c", (one, two, three), (two,))]) == 0
    assert known_share([]) == 0
    assert reuses_prefixes([every])
    assert not reuses_prefixes([Chunk("c", (PlannedSample("k", 3, (0,)),), (PlannedSample("k", 3, (0,)),))])


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30), st.integers(1, 8))
def test_equal_names_mean_equal_prefixes(a: list[int], b: list[int], block: int) -> None:
    names = list(zip(prefix_names(a, block), prefix_names(b, block), strict=False))
    assert len(prefix_names(a, block)) == len(a) // block
    for i, (x, y) in enumerate(names):
        stop = (i + 1) * block
        assert (x == y) == (a[:stop] == b[:stop])


def plan(directory: Path, rows: list[list[int]], mode: str) -> list[Chunk]:
    """The plan of a run over these samples, none of which is in the store."""
    path = directory / "table"
    with SampleTableWriter(path) as writer:
        writer.add(
            Sample(f"s{i}", f"k{i}", np.array(row, np.int32), np.ones(len(row), bool)) for i, row in enumerate(rows)
        )
    store: Any = SimpleNamespace(missing=lambda planned: [key for key, _ in planned])
    found: list[Chunk] = plan_chunks.fn(SampleTable(path), store, 4096, mode)
    return found


@pytest.mark.parametrize(
    ("mode", "shared", "reused"),
    [("auto", True, True), ("auto", False, False), ("on", False, True), ("off", True, False)],
)
def test_prefixes_are_reused_where_that_is_worthwhile_or_asked_for(
    tmp_path: Path, mode: str, shared: bool, reused: bool
) -> None:
    random = np.random.default_rng(0)
    prefix = random.integers(0, 99, 200).tolist()
    rows = [(prefix if shared else []) + random.integers(0, 99, 100 + i).tolist() for i in range(5)]
    chunks = plan(tmp_path, rows, mode)
    assert reuses_prefixes(chunks) is reused
    assert sorted(s.key for chunk in chunks for s in chunk.missing) == [f"k{i}" for i in range(5)]
    lengths = [s.num_tokens for s in chunks[0].samples]
    assert lengths == sorted(lengths, reverse=not reused)
