"""Several threads copy what one would."""

import pytest
import torch

from tasks.extract.copies import Copies


@pytest.mark.parametrize("threads", [1, 3])
def test_large_and_small_copies_of_any_shape(threads: int) -> None:
    copies = Copies(threads)
    sizes = [(2, 700, 1030), (3, 1, 5), (1501, 1024), (2, 0, 8)]
    here = [torch.arange(torch.Size(size).numel(), dtype=torch.float32).view(size) for size in sizes]
    # Into rows of something larger, as a sample's rows stand in its buffer.
    there = [torch.zeros(*size[:-2], size[-2] + 7, size[-1]) for size in sizes]
    copies.run([(to[..., 3 : 3 + rows.shape[-2], :], rows) for to, rows in zip(there, here, strict=True)])
    for to, rows in zip(there, here, strict=True):
        assert torch.equal(to[..., 3 : 3 + rows.shape[-2], :], rows)
        assert not to[..., :3, :].any()
        assert not to[..., -4:, :].any()
    copies.close()


def test_a_failed_copy_is_told() -> None:
    copies = Copies(2)
    with pytest.raises(RuntimeError):
        copies.run([(torch.zeros(1500, 1024), torch.zeros(1500, 1023))])
    copies.close()
