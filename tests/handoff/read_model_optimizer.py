"""Read an export with Model-Optimizer's own data set: run by its environment, with EXPORT OUT as arguments."""

import sys
from pathlib import Path

import torch
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset
from safetensors.torch import save_file

MAX_LEN = 64

files = sorted(str(path) for path in (Path(sys.argv[1]) / "samples").glob("*.pt"))
data = OfflineSupervisedDataset(files, answer_only_loss=True)
items = [data[i] for i in range(len(data))]
tensors = {}
for i, item in enumerate(items):
    tensors |= {f"{i}.{name}": torch.as_tensor(value) for name, value in item.items()}
batch = EagleOfflineDataCollator(MAX_LEN)(items)
for name, value in (batch | batch.pop("base_model_outputs")).items():
    tensors[f"batch.{name}"] = torch.as_tensor(value)
save_file({name: value.clone() for name, value in tensors.items()}, sys.argv[2])
