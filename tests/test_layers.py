"""Layer ids and depths: numbers that look alike must not be mixed up."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tasks.layers import Layers


def test_output_ids_are_one_deeper() -> None:
    assert Layers(ids=(2, 30, 58, 60), convention="output").depths == (3, 31, 59, 61)
    assert Layers(ids=(2, 30, 58, 60), convention="input").depths == (2, 30, 58, 60)


def test_the_last_layers_output_is_the_deepest() -> None:
    Layers(ids=(60,), convention="output").check(61)
    Layers(ids=(61,), convention="input").check(61)


@pytest.mark.parametrize(("convention", "above"), [("output", 61), ("input", 62)])
def test_ids_above_the_model_are_refused(convention: str, above: int) -> None:
    layers = Layers.model_validate({"ids": [2, above], "convention": convention})
    with pytest.raises(ValueError, match=rf"\[{above}\] lie above the model.*largest id is {above - 1}"):
        layers.check(61)


def test_the_id_that_only_the_other_convention_has_is_told() -> None:
    with pytest.raises(ValueError, match=r"largest id is 60; if ids are counted as vLLM .*say `convention: input`$"):
        Layers(ids=(2, 61), convention="output").check(61)
    with pytest.raises(ValueError, match=r"largest id is 61$"):
        Layers(ids=(2, 62), convention="input").check(61)


def test_a_layer_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\[7\] more than once"):
        Layers(ids=(7, 3, 7), convention="input").check(61)


@given(st.lists(st.integers(0, 100), min_size=1, unique=True))
def test_any_order_gives_ascending_depths(ids: list[int]) -> None:
    depths = Layers(ids=tuple(ids), convention="input").depths
    assert depths == tuple(sorted(ids))


@pytest.mark.parametrize(
    "bad", [[2, 30], {"ids": [2]}, {"ids": [], "convention": "input"}, {"ids": [-1], "convention": "input"}]
)
def test_a_bare_or_empty_list_is_refused(bad: object) -> None:
    with pytest.raises(ValidationError):
        Layers.model_validate(bad)
