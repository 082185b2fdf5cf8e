"""A store as small as it can be with everything that an export has to handle, and one of real states."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoTokenizer

from infra.assets.chats import demo_chats
from tasks.layers import Layers
from tasks.model import Checkpoint, final_norm, read
from tasks.store import FinalNorm, SourceRecord, Store
from tasks.verify.reference import residual_states
from tasks.vocabulary import Identity
from tests.checkpoints import checkpoint_path
from tests.store.samples import HIDDEN, Made, identity, make, stage

AUX = (2, 15, 27)
LAST = 30
IDENTITY = identity(depths=(2, 3, 15, 27, 30), layer_ids=(2, 3, 15, 27, 30), convention="input")
VOCAB = 50_000
NORM = FinalNorm(np.random.default_rng(3).normal(1, 0.2, HIDDEN).astype("<f4"), 1e-5)


@dataclass(frozen=True, eq=False)
class Source:
    """A conversation of the store."""

    source_id: str
    sample: Made
    loss_mask: npt.NDArray[np.bool_]


def conversations(of: Identity) -> list[Source]:
    """One token, one that no supervision touches, one longer than a loader takes, tokens that three share."""
    single, short, bare, long = (make(of, n, seed=n) for n in (1, 7, 12, 500))
    everywhere, nowhere = np.ones(12, bool), np.zeros(12, bool)
    return [
        Source("one token", single, np.ones(1, bool)),
        Source("../../etc/passwd", short, short.loss_mask),
        Source("unsupervised", bare, nowhere),
        Source("long", long, long.loss_mask),
        Source("the same tokens", bare, everywhere),
        Source("the same tokens and mask", bare, everywhere),
    ]


def fill(path: Path, of: Identity, sources: Sequence[Source], norm: FinalNorm | None = NORM) -> None:
    """Commit and record conversations."""
    with Store.open(path, of, run="test", final_norm=norm) as store:
        distinct = {each.sample.key: replace(each.sample, loss_mask=each.loss_mask) for each in reversed(sources)}
        store.commit([stage(store, made) for made in distinct.values()])
        store.record([SourceRecord(each.source_id, each.sample.key, each.loss_mask) for each in sources])


@pytest.fixture(scope="session")
def sources() -> list[Source]:
    return conversations(IDENTITY)


@pytest.fixture(scope="session")
def made_up(tmp_path_factory: pytest.TempPathFactory, sources: list[Source]) -> Path:
    """A store of made-up bfloat16 states; not to be written to."""
    path = tmp_path_factory.mktemp("made-up") / "store"
    fill(path, IDENTITY, sources)
    return path


@dataclass(frozen=True, eq=False)
class Real:
    """A store of SmolLM2's states of real chats, by Hugging Face's forward in float32."""

    store: Path
    checkpoint: Checkpoint
    identity: Identity
    ids: tuple[npt.NDArray[np.int32], ...]


@pytest.fixture(scope="session")
def real(tmp_path_factory: pytest.TempPathFactory) -> Real:
    path = checkpoint_path("smollm2")
    checkpoint, depths = read(path), (*AUX, LAST)
    of = checkpoint.identity(Layers(ids=depths, convention="input"), "float32")
    tokenizer = AutoTokenizer.from_pretrained(path)
    made = []
    with demo_chats().open(encoding="utf-8") as chats:
        for number, chat in enumerate(map(json.loads, islice(chats, 6))):
            text = "\n".join(message["content"] for message in chat["messages"])
            ids = np.array(tokenizer(text).input_ids[: 96 - 8 * (number % 3)], dtype=np.int32)
            made.append(Made(of.key(ids), ids, np.ones(len(ids), bool), residual_states(path, ids, depths).numpy()))
    store = tmp_path_factory.mktemp("real") / "store"
    weight, eps = final_norm(checkpoint)
    fill(
        store,
        of,
        [Source(f"chat {i}", each, each.loss_mask) for i, each in enumerate(made)],
        FinalNorm(weight, eps),
    )
    return Real(store, checkpoint, of, tuple(each.input_ids for each in made))


def states(made: Made) -> torch.Tensor:
    """[L, T, H] bfloat16 of a made-up sample."""
    return torch.from_numpy(made.states).view(torch.bfloat16)
