"""Chunks: every sample exactly once, within the budget, the same for the same input."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tasks.plan.chunks import distinct, split
from tasks.vocabulary import PlannedSample

LENGTHS = st.lists(st.integers(1, 100), max_size=60)


def samples(lengths: list[int]) -> list[PlannedSample]:
    return [PlannedSample(f"{i:04x}", n, (i,)) for i, n in enumerate(lengths)]


@given(LENGTHS, st.integers(1, 200))
def test_each_sample_is_in_one_chunk_of_the_budget(lengths: list[int], budget: int) -> None:
    chunks = split(samples(lengths), budget)
    assert sorted(s.key for c in chunks for s in c.samples) == [s.key for s in samples(lengths)]
    for chunk in chunks:
        assert chunk.num_tokens <= budget or len(chunk.samples) == 1
        assert [s.num_tokens for s in chunk.samples] == sorted((s.num_tokens for s in chunk.samples), reverse=True)


@given(LENGTHS, st.integers(1, 200))
def test_appended_input_leaves_earlier_chunks_as_they_are(lengths: list[int], budget: int) -> None:
    before = split(samples(lengths), budget)
    after = split(samples([*lengths, 5, 6]), budget)
    unchanged = before[:-1]
    assert after[: len(unchanged)] == unchanged


def test_rows_with_equal_keys_are_one_sample() -> None:
    assert distinct(["a", "b", "a"], np.array([3, 4, 3], np.int32)) == [
        PlannedSample("a", 3, (0, 2)),
        PlannedSample("b", 4, (1,)),
    ]
