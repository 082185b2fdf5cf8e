"""Read an export with speculators' own data set: run by its environment, ``read_speculators.py EXPORT OUT``."""

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution, save_token_frequency_distribution

MAX_LEN = 64

export, out = Path(sys.argv[1]), Path(sys.argv[2])
data = ArrowDataset(MAX_LEN, export, on_missing="raise")
tensors = {"lengths": torch.tensor(data.approx_lengths)}
items = [data[i] for i in range(len(data))]
for i, item in enumerate(items):
    tensors |= {f"{i}.{name}": value.clone() for name, value in item.items()}
    tensors |= {f"{i}.shifted.{name}": value.clone() for name, value in shift_batch(item).items()}
batch = CollateFn(MAX_LEN, tensors["0.verifier_last_hidden_states"].shape[1], preprocess=shift_batch)(items)
tensors |= {f"batch.{name}": value for name, value in batch.items() if isinstance(value, torch.Tensor)}

# What the project itself counts and chooses on these files.
save_token_frequency_distribution(data.data, out.with_suffix(".pt"))
frequencies = torch.load(out.with_suffix(".pt"), weights_only=True)
written = torch.load(export / "token_freq.pt", weights_only=True)
assert written == frequencies, "token frequencies"
d2t, t2d = build_vocab_mappings_from_distribution(frequencies, int(sys.argv[3]), int(sys.argv[4]))
save_file(tensors | {"d2t": d2t, "t2d": t2d}, out)
