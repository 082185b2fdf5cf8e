"""Train an EAGLE-3 draft model on a store, with speculators' own model, data loading and trainer.

    .venv/bin/python -m infra.bench.train_eagle3

Extracts real chats through SmolLM2-135M into a store (once), and trains a draft of one layer on it three times: on the
states as they are, on the states of one layer before, and on rows that stand one token too late. Every draft is judged
on the same held-out conversations with the right states, as it would be used: does its most likely token agree with
the target's? The store is read directly, nothing is exported. Takes a GPU when there is one.
"""

import argparse
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import yaml
from torch.utils.data import DataLoader, Dataset

ROOT = Path(__file__).parent.parent.parent
AUX = (2, 15, 27)  # of 30 layers, as speculators chooses them
LAST = 30
BEFORE = tuple(depth - 1 for depth in (*AUX, LAST))
HELD_OUT = 0.15
VARIANTS = ("right", "one layer off", "one row off")


@dataclass(frozen=True)
class Run:
    """What one training gave."""

    variant: str
    losses: tuple[float, ...]
    """Training loss of each epoch, the mean over its steps."""
    agreement: tuple[float, ...]
    """Held-out agreement of the first drafted token with the target's, before training and after each epoch."""
    held_out_loss: tuple[float, float]
    """Held-out loss, before training and after it."""
    seconds: float


class Misaligned(Dataset[dict[str, torch.Tensor]]):
    """A store as a faulty extraction would have left it."""

    def __init__(self, url: str, variant: str) -> None:
        from tasks.store.dataset import SampleDataset

        depths = BEFORE if variant == "one layer off" else (*AUX, LAST)
        self._samples, self._late = SampleDataset(url, depths=depths), variant == "one row off"
        self.approx_lengths = self._samples.lengths.tolist()

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        item = self._samples[index]
        states_LTH, num_tokens = item["hidden_states"], len(item["input_ids"])
        if self._late:
            states_LTH = torch.cat([states_LTH[:, :1], states_LTH[:, :-1]], dim=1)
        return {
            "hidden_states": states_LTH[:-1].transpose(0, 1).flatten(1),
            "verifier_last_hidden_states": states_LTH[-1],
            "input_ids": item["input_ids"],
            "loss_mask": item["loss_mask"].long(),
            "position_ids": torch.arange(num_tokens),
            "lengths": torch.tensor([num_tokens]),
        }


class Part(Dataset[Any]):
    """Some items of a data set, with their lengths."""

    def __init__(self, items: Any, indices: Sequence[int]) -> None:
        self._items, self._indices = items, indices
        self.approx_lengths = [items.approx_lengths[i] for i in indices]

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self._items[self._indices[index]]


def extract(store: Path, conversations: int) -> None:
    """Extract chats into the store; what is there already is not computed again."""
    from infra.assets.chats import chats
    from infra.assets.smollm2 import smollm2

    preset = {
        "model": {"path": str(smollm2())},
        "layers": {"ids": sorted({*AUX, LAST, *BEFORE}), "convention": "input"},
        "dtype": "float32",
        "data": {"path": str(chats("chitchat")), "limit": conversations},
        "chunk_tokens": 8192,
        "store": str(store),
        "engine": {
            "max_model_len": 1024,
            "max_num_batched_tokens": 1024,
            "kv_cache_gib": 0.5,
            "staging_gib": 1,
            "writer_threads": 1,
            "in_process": True,
        },
    }
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "eagle3.yaml"
        path.write_text(yaml.safe_dump(preset))
        subprocess.run([sys.executable, "-m", "flows.cli", "extract", str(path)], cwd=ROOT, check=True)


def train(store: str, variant: str, args: argparse.Namespace) -> Run:
    """Train one draft model and judge it after every epoch."""
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.train.cli import create_transformer_layer_config
    from speculators.train.trainer import Trainer, TrainerConfig

    from infra.assets.smollm2 import smollm2
    from infra.examples.eagle3_loader import trainer_loader
    from tasks.model import read
    from tasks.store.eagle import EagleDataset
    from tasks.tokenize.draft_vocabulary import count_tokens, draft_vocabulary

    began = perf_counter()
    torch.manual_seed(args.seed)
    checkpoint = read(smollm2())
    right = EagleDataset(store, AUX)
    split = round(len(right) * (1 - HELD_OUT))
    train_set = Part(right if variant == "right" else Misaligned(store, variant), range(split))
    held_out = Part(right, range(split, len(right)))
    reader = right.samples.reader
    counts = count_tokens(map(reader.tokens, reader.source_ids[:split]), checkpoint.vocab_size)
    vocabulary = draft_vocabulary(counts, args.draft_vocab)

    def loader(data: Part) -> DataLoader[Any]:
        return trainer_loader(
            data, data.approx_lengths, args.batch_tokens, checkpoint.hidden_size, dtype=torch.float32, seed=args.seed
        )

    on_gpu = torch.cuda.is_available()
    model = Eagle3DraftModel.from_training_args(
        create_transformer_layer_config(
            verifier_name_or_path=str(checkpoint.path),
            num_layers=1,
            draft_arch="llama",
            hidden_act=None,
            sliding_window=None,
            full_attention_indices=[0],
        ),
        t2d=torch.from_numpy(vocabulary.t2d),
        d2t=torch.from_numpy(vocabulary.d2t),
        draft_vocab_size=args.draft_vocab,
        norm_before_residual=True,
        target_layer_ids=list(AUX),
        ttt_steps=args.ttt_steps,
        verifier_name_or_path=str(checkpoint.path),
        draft_attn_impl="simple_flex_attention" if on_gpu else "eager",
    )
    train_kwargs, val_kwargs = Eagle3DraftModel.get_trainer_kwargs(
        loss_fn="kl_div", loss_implementation="eager", ttt_steps=args.ttt_steps, ttt_step_loss_decay=1.0
    )
    with tempfile.TemporaryDirectory() as scratch, collected_losses() as losses:
        config = TrainerConfig(
            lr=args.lr,
            num_epochs=args.epochs,
            save_path=scratch,
            train_call_kwargs=train_kwargs,
            val_call_kwargs=val_kwargs,
            hidden_states_dtype=torch.float32,
        )
        trainer = Trainer(model, config, loader(train_set), loader(held_out))
        trainer.device_type = "cuda" if on_gpu else "cpu"
        judged = [trainer.val_epoch(0)]
        epochs = []
        for epoch in range(args.epochs):
            losses.clear()
            trainer.train_epoch(epoch)
            epochs.append(float(np.mean(losses)))
            judged.append(trainer.val_epoch(epoch))
    return Run(
        variant,
        tuple(epochs),
        tuple(each["full_acc_0_epoch"] for each in judged),
        (judged[0]["loss_epoch"], judged[-1]["loss_epoch"]),
        perf_counter() - began,
    )


@contextmanager
def collected_losses() -> Iterator[list[float]]:
    """The training loss of every step, as the trainer logs it."""
    losses: list[float] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if isinstance(record.msg, dict) and "train" in record.msg:
                losses.append(record.msg["train"]["loss"])

    logger, handler = logging.getLogger("speculators.metrics"), Collector()
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield losses
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


def let_the_trainer_run_on_a_cpu() -> None:
    """Its device is the number of an accelerator, and it waits for one when it takes times."""
    from speculators.train import distributed

    distributed._local_rank = torch.device("cpu")
    torch.accelerator.synchronize = lambda *_args, **_kwargs: None


def table(runs: Sequence[Run]) -> str:
    """The results as Markdown."""
    lines = [
        "| trained on | loss by epoch | held-out loss, before → after | held-out agreement, before → by epoch | s |",
        "|---|---|---|---|---|",
    ]
    for run in runs:
        lines.append(
            f"| {run.variant} | {', '.join(f'{loss:.2f}' for loss in run.losses)} "
            f"| {run.held_out_loss[0]:.2f} → {run.held_out_loss[1]:.2f} "
            f"| {run.agreement[0]:.1%} → {', '.join(f'{share:.1%}' for share in run.agreement[1:])} "
            f"| {run.seconds:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", type=Path, default=ROOT / "stores" / "eagle3")
    parser.add_argument("--conversations", type=int, default=110, help="how many chats are extracted")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--ttt-steps", type=int, default=1, help="tokens drafted in a row")
    parser.add_argument("--draft-vocab", type=int, default=4096)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if importlib.util.find_spec("speculators") is None:
        from infra.peers import environment

        extract(args.store, args.conversations)
        command = [str(environment("speculators")), "-m", "infra.bench.train_eagle3", *sys.argv[1:]]
        sys.exit(subprocess.run(command, cwd=ROOT, env=os.environ | {"HF_HUB_OFFLINE": "1"}).returncode)
    if not torch.cuda.is_available():
        let_the_trainer_run_on_a_cpu()
    runs = []
    for variant in args.variants:
        runs.append(train(str(args.store), variant, args))
        print(runs[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps([vars(run) for run in runs], indent=1))
    print(table(runs))


if __name__ == "__main__":
    main()
