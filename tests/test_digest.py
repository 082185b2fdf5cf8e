"""Digests: any change of values, places or signs shows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.digest import bit_digests, column_weights, row_digests, sample_digest

STATES = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))


def digest(rows: torch.Tensor) -> str:
    return sample_digest(row_digests(rows).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(row=st.integers(0, 63), column=st.integers(0, 31), bit=st.integers(0, 15))
def test_any_flipped_bit_shows(dtype: torch.dtype, row: int, column: int, bit: int) -> None:
    states = STATES.to(dtype)
    changed = states.clone()
    bits = changed.view(torch.int16 if dtype == torch.bfloat16 else torch.int32)
    bits[row, column] ^= torch.tensor(1 << bit if bit < 15 else -(1 << 15)).to(bits.dtype)
    assert digest(changed) != digest(states)


@given(st.integers(0, 63), st.integers(0, 63))
def test_swapped_rows_show(a: int, b: int) -> None:
    order = list(range(64))
    order[a], order[b] = order[b], order[a]
    assert (digest(STATES[order]) == digest(STATES)) == (a == b)


@given(st.integers(1, 31))
def test_rotated_columns_show(shift: int) -> None:
    assert digest(STATES.roll(shift, dims=1)) != digest(STATES)


@given(st.integers(1, 63))
def test_shifted_rows_show(shift: int) -> None:
    assert digest(STATES.roll(shift, dims=0)) != digest(STATES)


def test_negative_zero_is_another_value() -> None:
    zeros = torch.zeros(1, 4)
    assert digest(-zeros) != digest(zeros)


def test_pieces_have_the_same_row_digests_as_the_whole() -> None:
    pieces = [row_digests(STATES[:7]), row_digests(STATES[7:])]
    assert np.array_equal(torch.cat(pieces).numpy(), row_digests(STATES).numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_of_the_opposite_sign_shows(dtype: torch.dtype) -> None:
    """Modulo 2^32, an even number of odd weights times 2^31 is nothing."""
    states = STATES.to(dtype)
    assert torch.all(row_digests(-states) != row_digests(states))
    assert torch.all(row_digests(-states) >> 32 != row_digests(states) >> 32)


@given(st.lists(st.tuples(st.integers(1, 300), st.sampled_from([8, 32]), st.booleans()), min_size=1, max_size=4))
def test_a_digest_is_two_sums_of_weighted_bits(calls: list[tuple[int, int, bool]]) -> None:
    """Whatever was digested before in the same thread, in whichever mode."""
    for num_rows, columns, inference in calls:
        bits = np.random.default_rng(num_rows).integers(-(2**15), 2**15, (num_rows, columns), np.int16)
        with torch.inference_mode(inference):
            found = bit_digests(bits)
        sums = bits.astype(np.int64) @ column_weights(columns, torch.device("cpu")).numpy().astype(np.int64).T
        first, second = (sums & 0xFFFFFFFF).astype(np.uint64).T
        assert np.array_equal(found.view(np.uint64), first << np.uint64(32) | second)
