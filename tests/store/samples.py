"""Small samples with known content, staged and committed as a run does it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tasks.store import SourceRecord, StagedSample, Store
from tasks.store.stage import stage_states
from tasks.vocabulary import Identity, Sharing

HIDDEN = 32
OWN = 40
"""Tokens by which a sample differs from others of its family."""


def identity(**changes: object) -> Identity:
    values: dict[str, object] = {
        "model": "hub:abc",
        "architecture": "LlamaForCausalLM",
        "num_layers": 30,
        "hidden_size": HIDDEN,
        "depths": (3, 15, 28, 30),
        "convention": "output",
        "layer_ids": (2, 14, 27, 29),
        "dtype": "bfloat16",
    }
    return Identity(**{**values, **changes})  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class Made:
    """A sample before it is stored."""

    key: str
    input_ids: npt.NDArray[np.int32]
    loss_mask: npt.NDArray[np.bool_]
    states: npt.NDArray[np.generic]
    shared: int = 0
    """Tokens with which others begin, too."""


def make(of: Identity, num_tokens: int, seed: int = 0, family: int | None = None) -> Made:
    """A sample whose states look like a residual stream: heavy-tailed, in bfloat16 where the identity says so.

    Those of one family begin alike, with all tokens but the last 40.
    """
    if family is not None:
        shared, own = make(of, num_tokens - OWN, family), make(of, OWN, seed)
        ids = np.concatenate([shared.input_ids, own.input_ids])
        states = np.concatenate([shared.states, own.states], axis=1)
        return Made(of.key(ids), ids, np.concatenate([shared.loss_mask, own.loss_mask]), states, num_tokens - OWN)
    random = np.random.default_rng([num_tokens, seed])
    ids = random.integers(0, 50_000, num_tokens, dtype=np.int32)
    values = random.standard_t(3, (len(of.depths), num_tokens, of.hidden_size)).astype("<f4")
    states = values if of.dtype == "float32" else (values.view("<u4") >> 16).astype("<u2")
    return Made(of.key(ids), ids, random.random(num_tokens) < 0.5, states)


def stage(store: Store, sample: Made, sources: Sequence[str] = ()) -> StagedSample:
    spec = store.stage_spec() | {"sharing": Sharing(sample.shared)}
    objects = stage_states(store.staging(), sample.key, spec, sample.states, sample.input_ids)
    return StagedSample(sample.key, len(sample.input_ids), objects, sample.loss_mask, 7, tuple(sources))


def fill(store: Store, samples: Sequence[Made], prefix: str = "chat") -> None:
    """Stage, commit and record, with one source id a sample."""
    store.commit([stage(store, sample, (f"{prefix}-{i}",)) for i, sample in enumerate(samples)])
    store.record(SourceRecord(f"{prefix}-{i}", s.key, s.loss_mask) for i, s in enumerate(samples))
