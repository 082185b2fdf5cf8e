"""Feed speculators' EAGLE-3 trainer from a store, without exporting it.

    python -m infra.examples.eagle3_loader stores/mine 2 15 27

in an environment that has both packages. The depths are speculators' ``--target-layer-ids``; the store may be local or
an ``s3://`` URL. :class:`tasks.store.eagle.EagleDataset` stands in for speculators' ``ArrowDataset``: its rows are not
shifted, and speculators' own ``shift_batch`` aligns state t with token t + 1 while a batch is collated.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from tasks.store.eagle import EagleDataset


def trainer_loader(
    data: Dataset[Any],
    lengths: Sequence[int],
    batch_tokens: int,
    hidden_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_workers: int = 0,
    seed: int = 0,
) -> DataLoader[Any]:
    """Batches for ``speculators.train.trainer.Trainer``: samples packed into one row of ``batch_tokens`` tokens."""
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import CollateFn
    from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2

    return DataLoader(
        data,
        batch_sampler=MultipackDistributedBatchSamplerV2(batch_tokens, lengths, num_replicas=1, rank=0, seed=seed),
        collate_fn=CollateFn(batch_tokens, hidden_size, dtype=dtype, preprocess=shift_batch),
        num_workers=num_workers,
        multiprocessing_context="spawn" if num_workers else None,
    )


def main() -> None:
    url, depths = sys.argv[1], [int(depth) for depth in sys.argv[2:]]
    data = EagleDataset(url, depths)
    hidden_size = data.samples.reader.identity.hidden_size
    loader = trainer_loader(data, data.approx_lengths, 2048, hidden_size, dtype=data.hidden_states_dtype)
    for batch in loader:
        print({name: tuple(value.shape) for name, value in batch.items() if isinstance(value, torch.Tensor)})


if __name__ == "__main__":
    main()
