"""Read an export with SpecForge's own reader: run by its environment, ``read_specforge.py EXPORT OUT``."""

import sys

import torch
from safetensors.torch import save_file
from specforge.algorithms.eagle3.data import build_offline_collator, build_offline_normalizer
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.data_plane.feature_dataloader import FeatureDataLoader
from specforge.runtime.data_plane.feature_store import LocalFeatureStore
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader

MAX_LEN = 64

references = OfflineManifestReader(sys.argv[1], max_len=MAX_LEN, validate_files=True).read()


def batches(size: int, max_len: int) -> FeatureDataLoader:
    return FeatureDataLoader(
        LocalFeatureStore(),
        refs=references,
        batch_size=size,
        collate_fn=build_offline_collator(),
        per_sample_transform=build_offline_normalizer(max_len),
        drop_last=False,
        ack=False,
    )


tensors: dict[str, torch.Tensor] = {"lengths": torch.tensor([each.num_tokens for each in references])}
for i, batch in enumerate(batches(1, 1 << 20)):
    tensors |= {f"{i}.{name}": value for name, value in batch.tensors.items()}
    ids, target, mask = TargetHead.preprocess(
        None, *(batch.tensors[name].clone() for name in ("input_ids", "target", "loss_mask"))
    )
    tensors |= {f"{i}.shifted.input_ids": ids, f"{i}.shifted.target": target, f"{i}.shifted.loss_mask": mask}
(batch,) = batches(len(references), MAX_LEN)
tensors |= {f"batch.{name}": value for name, value in batch.tensors.items()}
save_file({name: value.clone() for name, value in tensors.items()}, sys.argv[2])
