"""The gather over any number of ranks: who is odd, by how much, and whether shared rows cover a sample once."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.digest import row_digests, sample_digest
from tasks.verify.agreement import compare, coverage, differences, odd_ranks
from tasks.vocabulary import Receipt, RowEvidence
from tests.verify.test_judge import receipt

DEPTHS = (1, 3)


def holding(rank: int, states_LTH: torch.Tensor, **changes: Any) -> Receipt:
    """A rank's receipt with the evidence that is fetched on disagreement."""
    digests_TL = np.stack([row_digests(rows).numpy() for rows in states_LTH], axis=1)
    rows = tuple(range(states_LTH.shape[1]))
    evidence = RowEvidence(digests_TL.astype("<i8").tobytes(), rows, states_LTH.numpy().astype("<f4").tobytes())
    digests = tuple(sample_digest(d) for d in digests_TL.T)
    return replace(receipt(rank), digests=digests, evidence=evidence, **changes)


@pytest.mark.parametrize("size", [3, 4, 8])
@pytest.mark.parametrize("odd", [0, 2])
def test_the_odd_rank_is_named_and_measured(size: int, odd: int) -> None:
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    wrong = states.clone()
    wrong[1, 3] *= -1
    receipts = [holding(rank, wrong if rank == odd else states) for rank in range(size)]
    assert odd_ranks(receipts) == [odd]
    (difference,) = differences(receipts, DEPTHS)
    assert (difference.depth, difference.first_row, difference.num_rows) == (3, 3, 1)
    assert odd in difference.ranks
    assert difference.max_abs == pytest.approx(2 * float(states[1, 3].abs().max()))
    assert difference.cosine == pytest.approx(-1)


def test_of_two_ranks_the_one_that_convicts_itself_is_odd() -> None:
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    wrong = states.clone()
    wrong[0, 2] = 0
    right = holding(0, states, unlike_rows=(0, 0))
    assert odd_ranks([right, holding(1, wrong, unlike_rows=(1, 0))]) == [1]
    assert odd_ranks([right, holding(1, wrong, zero_rows=(1, 0))]) == [1]
    assert odd_ranks([right, holding(1, wrong, unlike_rows=(0, 0))]) == []
    (difference,) = differences([right, holding(1, wrong)], DEPTHS)
    assert difference.ranks == (0, 1)
    assert difference.cosine == 0


def test_without_values_the_rows_are_still_named() -> None:
    states = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    wrong = states.clone()
    wrong[0, 1, 0] += 1
    receipts = [holding(0, states), holding(1, wrong)]
    receipts = [replace(r, evidence=replace(r.evidence, rows=(), values=None)) for r in receipts if r.evidence]
    (difference,) = differences(receipts, DEPTHS)
    assert str(difference) == "r_1 of ranks 0 and 1: 1 rows from row 1"


@given(st.integers(1, 200), st.integers(1, 9), st.randoms())
def test_ranges_that_cover_once_are_right_and_no_others(num_tokens: int, ranks: int, random: Any) -> None:
    cuts = sorted(random.sample(range(1, num_tokens), min(ranks - 1, num_tokens - 1))) if num_tokens > 1 else []
    bounds = [0, *cuts, num_tokens]
    ranges = list(pairwise(bounds))
    random.shuffle(ranges)
    assert coverage(ranges, num_tokens) is None
    start, stop = ranges[0]
    assert coverage(ranges[1:], num_tokens) is not None, "a share is missing"
    assert coverage([*ranges, (start, stop)], num_tokens) is not None, "a share is there twice"
    assert coverage(ranges, num_tokens + 1) is not None
    assert coverage([*ranges, (num_tokens, num_tokens + 1)], num_tokens) is not None


def test_what_is_wrong_with_the_cover_is_said() -> None:
    assert coverage([(0, 4), (6, 9)], 9) == "rows [4, 6) are on no rank"
    assert coverage([(0, 5), (4, 9)], 9) == "rows [4, 5) are on more than one rank"
    assert coverage([(0, 5)], 9) == "rows [5, 9) are on no rank"
    assert coverage([(0, 12)], 9) == "rows [9, 12) lie behind the sample"
    assert coverage([(0, 9), (9, 9)], 9) == "the range [9, 9) holds no row"


def test_two_zero_rows_are_equal() -> None:
    zero = np.zeros((1, 4), dtype=np.float32)
    assert compare(zero, zero) == (0.0, 1.0)
    assert compare(zero, zero + 1) == (1.0, 0.0)
