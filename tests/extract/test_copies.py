"""Several threads copy what one would."""

import numpy as np
import pytest

from tasks.extract.copies import Copies


@pytest.mark.parametrize("threads", [1, 3])
def test_large_and_small_copies_of_any_shape(threads: int) -> None:
    copies, random = Copies(threads), np.random.default_rng(0)
    sizes = [(2, 7000, 4120), (3, 1, 20), (15001, 4096), (2, 0, 32)]
    here = [random.integers(0, 256, size, np.uint8) for size in sizes]
    # Into rows of something larger, as a sample's rows stand in its buffer.
    there = [np.zeros((*size[:-2], size[-2] + 7, size[-1]), np.uint8) for size in sizes]
    copies.run([(to[..., 3 : 3 + rows.shape[-2], :], rows) for to, rows in zip(there, here, strict=True)])
    for to, rows in zip(there, here, strict=True):
        assert np.array_equal(to[..., 3 : 3 + rows.shape[-2], :], rows)
        assert not to[..., :3, :].any()
        assert not to[..., -4:, :].any()
    copies.close()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_beginnings_of_rows_are_marked(threads: int) -> None:
    copies = Copies(threads)
    sizes = [(2, 700, 4120), (3, 1, 20), (6000, 4096), (2, 0, 32)]
    rows = [np.zeros(size, np.uint8) for size in sizes]
    copies.mark(rows, 16, 0xFF)
    for marked in rows:
        assert (marked[..., :16] == 0xFF).all()
        assert not marked[..., 16:].any()
    copies.close()


def test_a_failed_copy_is_told() -> None:
    copies = Copies(2)
    with pytest.raises(ValueError, match="broadcast"):
        copies.run([(np.zeros((6000, 4096), np.uint8), np.zeros((6000, 4095), np.uint8))])
    copies.close()
