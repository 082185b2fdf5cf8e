"""Keys: what must change them does, and what must not does not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.vocabulary import Identity

IDENTITY = Identity(
    model="files:abc",
    architecture="LlamaForCausalLM",
    num_layers=6,
    hidden_size=256,
    depths=(1, 3),
    convention="output",
    layer_ids=(0, 2),
    dtype="bfloat16",
)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "files:abd"},
        {"depths": (1, 4)},
        {"dtype": "float32"},
        {"schema": 2},
        {"numerics": {"quantization": "fp8"}},
        {"hidden_size": 128},
    ],
)
def test_what_decides_values_or_shape_changes_the_key(change: dict[str, object]) -> None:
    assert replace(IDENTITY, **change).key([1, 2, 3]) != IDENTITY.key([1, 2, 3])  # type: ignore[arg-type]


def test_how_the_layers_were_counted_does_not_change_the_key() -> None:
    other = replace(IDENTITY, convention="input", layer_ids=(1, 3))
    assert other.key([1, 2, 3]) == IDENTITY.key([1, 2, 3])


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1), min_size=1))
def test_keys_are_equal_exactly_for_equal_ids(a: list[int], b: list[int]) -> None:
    assert (IDENTITY.key(a) == IDENTITY.key(np.asarray(b))) == (a == b)
