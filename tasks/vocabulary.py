"""What the rooms hand to each other.

Letters in names and shapes: L captured depths, T tokens of one sample, H hidden size, V vocabulary.

* sample: one tokenized conversation, identified by its key.
* key: content hash over the token ids and everything that decides the states' values and shape.
* chunk: the samples that one task run extracts, verifies and commits.
* depth: k of r_k, the residual stream after k decoder layers.
* receipt: what one rank of the engine says of one sample it captured; small, no tensors.
* verdict: what the verification says of one sample, from the receipts of all ranks.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from tasks.layers import Convention

CAPTURE_SCHEMA = 1  # raise it when the capture changes what a stored value means; old samples are then not reused

DType = Literal["bfloat16", "float32"]
StoredAs = Literal["exact", "float8_e4m3"]
ReusePrefixes = Literal["auto", "on", "off"]

#: Name in :attr:`Identity.numerics`: the states at the last depth are not r_L but the output of the final norm, as
#: other tools keep them; only imported stores have such states.
LAST_IS_NORMED = "last_state_after_final_norm"

#: path of a data object relative to its sample's directory -> (bytes, crc32c of the bytes)
Objects = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Identity:
    """Everything that decides the values and the shape of a store's states; one store holds one identity."""

    model: str
    """Fingerprint of the checkpoint (see :func:`tasks.model.fingerprint`)."""
    architecture: str
    num_layers: int
    hidden_size: int
    depths: tuple[int, ...]
    """Captured depths, ascending."""
    convention: Convention
    """How the user counted the layers; no part of the key, since depths say the same."""
    layer_ids: tuple[int, ...]
    """The user's ids in that convention, in the order of ``depths``; no part of the key."""
    dtype: DType
    """Element type of the states as the engine computes them."""
    numerics: Mapping[str, Any] = field(default_factory=dict)
    """Engine arguments that change values (quantization, overrides of the model's config, ...), where set."""
    stored_as: StoredAs = "exact"
    """``exact`` keeps every bit; ``float8_e4m3`` keeps 8 bits an element, with a scale per token and depth."""
    schema: int = CAPTURE_SCHEMA

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) over all that decides values and shape."""
        decisive = asdict(self)
        del decisive["convention"], decisive["layer_ids"]
        return hashlib.sha256(json.dumps(decisive, sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    @property
    def last_is_normed(self) -> bool:
        """Whether the states at the last depth went through the model's final norm, see :data:`LAST_IS_NORMED`."""
        return bool(self.numerics.get(LAST_IS_NORMED, False))

    def key(self, input_ids: npt.ArrayLike) -> str:
        """Key of the sample with these token ids: sha256 (64 hex digits) over the identity and the ids."""
        ids = np.ascontiguousarray(input_ids, dtype="<i4")
        return hashlib.sha256(bytes.fromhex(self.digest) + ids.tobytes()).hexdigest()

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape [L, T, H] that the states of a sample with ``num_tokens`` tokens must have."""
        return len(self.depths), num_tokens, self.hidden_size


def digest_ids(input_ids: npt.ArrayLike) -> str:
    """sha256 (hex) over token ids as little-endian int32, as planned, computed and stored ids are compared."""
    return hashlib.sha256(np.ascontiguousarray(input_ids, dtype="<i4").tobytes()).hexdigest()


@dataclass(frozen=True)
class PlannedSample:
    """A distinct sample of the input: its key, and the rows of the sample table that hold it."""

    key: str
    num_tokens: int
    rows: tuple[int, ...]
    """Rows of the :class:`tasks.samples.SampleTable` with these token ids; more than one for duplicates."""
    like_previous: int = 0
    """Tokens, in whole blocks, with which the sample before it in the plan begins, too."""
    shared: int = 0
    """Up to this many tokens, others of the plan may begin alike; 0 where prefixes are not reused."""


@dataclass(frozen=True)
class Chunk:
    """Samples that one task run extracts, verifies and commits."""

    name: str
    """Stable across reruns of the same input, e.g. ``chunk-0007-3fa1c2``."""
    samples: tuple[PlannedSample, ...]
    """The longest first; where prefixes are reused, those that begin alike next to each other."""
    missing: tuple[PlannedSample, ...] = ()
    """Those that the store lacks."""

    @property
    def num_tokens(self) -> int:
        return sum(sample.num_tokens for sample in self.samples)


@dataclass(frozen=True)
class Profile:
    """How large the states of one sample are along its tokens: enough for a picture, small enough for a receipt."""

    positions: tuple[int, ...]
    """Token positions, evenly spread over the sample."""
    rms: tuple[tuple[float, ...], ...]
    """Per depth, the root mean square of the rows at these positions."""
    peaks: tuple[tuple[tuple[int, float], ...], ...]
    """Per depth, (position, RMS) of the largest rows that stand out from the median row."""


@dataclass(frozen=True)
class RowEvidence:
    """What a rank keeps of single rows, fetched only where ranks disagree."""

    digests: bytes
    """int64 [T, L], little-endian: :func:`tasks.digest.row_digests` of every row."""
    rows: tuple[int, ...] = ()
    """Rows whose values were fetched."""
    values: bytes | None = None
    """float32 [L, len(rows), H], little-endian; None where the rank kept no values (see the retry)."""


class StagingFailure(Exception):
    """The place where samples are staged cannot be written to: no fault of any sample, so none is judged by it."""

    def __init__(self, message: str, *, lasting: bool = False) -> None:
        """``lasting``: whether it stays so until somebody does something (a full disk, a missing permission)."""
        super().__init__(message)
        self.lasting = lasting


class ChunkGone(Exception):
    """A chunk whose rows are only in a file that other samples have is not there to be linked to."""


class SharedChunk(NamedTuple):
    """A chunk of a staged sample that others may link to instead of encoding theirs."""

    name: str
    """By its content."""
    start: int
    """First token."""
    stop: int
    """Behind the last token."""
    depths: int
    """How many it has."""


@dataclass
class Sharing:
    """What a sample that is being staged has in common with others."""

    tokens: int = 0
    """With which others may begin, too."""
    elsewhere: Sequence[tuple[int, int]] = ()
    """Rows [start, stop) of whole chunks that others have staged, or will have. The sample comes without them."""
    linked: Callable[[], Mapping[str, SharedChunk]] = dict
    """Gives those chunks by path. Called when all others of the sample are written; may wait."""
    chunks: dict[str, SharedChunk] = field(default_factory=dict)
    """Filled in by the stage: other chunks by path, to which others may link."""


@dataclass(frozen=True)
class Receipt:
    """What one rank says of one sample it captured. Small enough for the engine's message queue."""

    key: str
    rank: int
    world_size: int
    shape: tuple[int, ...]
    """Shape of the states this rank holds: [L, T, H] for a replicated residual stream."""
    dtype: str
    ids_digest: str
    """:func:`digest_ids` over the token ids that were in the model's input buffer for the captured rows."""
    digests: tuple[str, ...]
    """Per depth, a position-sensitive digest of the states as the device computed them (see tasks.digest)."""
    rms: tuple[float, ...]
    """Per depth, the root mean square over all elements."""
    nonfinite: tuple[int, ...]
    """Per depth, how many elements are NaN or infinite."""
    zero_rows: tuple[int, ...]
    """Per depth, how many rows are all zero."""
    staged_digests: tuple[str, ...] | None = None
    """The same digests over the states as they arrived at the writer, where this rank staged the sample."""
    objects: Objects | None = None
    """The staged data objects, where this rank staged the sample; None on the other ranks."""
    next_token: int | None = None
    """The token that the engine sampled greedily after the sample."""
    storage_failed: Literal["passing", "lasting"] | None = None
    """Where ``error`` is a :class:`StagingFailure`, which kind."""
    error: str | None = None
    """What went wrong on this rank (incomplete rows, a failed write); the other fields may then be empty."""
    rows: tuple[tuple[int, int], ...] | None = None
    """Token ranges [start, stop) that this rank holds where ranks share the rows; None if it holds all."""
    unlike_rows: tuple[int, ...] | None = None
    """Per depth, rows that differ from what the decoder layer was itself given; None if that was not watched."""
    healed_rows: tuple[int, ...] = ()
    """Per depth, rows that are NaN or infinite here and finite at a deeper depth, as no residual stream is."""
    repeated_rows: tuple[int, ...] = ()
    """Per depth, rows equal bit for bit to the row of another token."""
    carried_rows: tuple[int, ...] = ()
    """Per depth, rows equal bit for bit to the same token's at the depth captured before; 0 for the first."""
    median_rms: tuple[float, ...] = ()
    """Per depth, the median over the rows of their root mean square: massive activations do not move it."""
    changed_rows: tuple[int, ...] | None = None
    """Per depth, rows that arrived at the writer with other bits, where this rank staged the sample."""
    unwritten_rows: tuple[int, ...] | None = None
    """Of these, rows that still held the poison that marks a row until it is written."""
    last_row: bytes | None = None
    """Bits of the deepest state at the last token as they arrived at the writer, where this rank staged the sample."""
    profile: Profile | None = None
    """Where this rank staged the sample."""
    evidence: RowEvidence | None = None
    """Where ranks disagree."""
    reused: tuple[tuple[str, int], ...] = ()
    """Rows that were computed for another sample with the same prefix: (its key, number of rows)."""
    rows_gone: bool = False
    """Whether the engine took rows from its KV cache that this rank no longer held; the sample is computed again."""

    @property
    def reused_from(self) -> dict[str, int]:
        """Key of another sample -> rows that were computed for it."""
        return dict(self.reused)

    def without_values(self) -> "Receipt":
        """The receipt without what only the verification needs; a run keeps the receipts of all its samples."""
        return replace(self, last_row=None, profile=None, evidence=None)

    def to_evidence(self) -> dict[str, Any]:
        """The part that is kept of a refused sample: figures and digests, no values, in what JSON can hold."""
        bulky = ("objects", "last_row", "profile", "evidence")
        return {k: v for k, v in asdict(self).items() if k not in bulky and v is not None}


Outcome = Literal["proved", "near tie", "failed"]


@dataclass(frozen=True)
class Proof:
    """Whether r_L at a sample's last token gives the token that the engine sampled (see tasks.verify.proof)."""

    outcome: Outcome
    sampled: int
    computed: int
    """The most likely token by the checkpoint's norm and head."""
    gap: float
    """Logit of the computed token less that of the sampled."""
    margin: float
    """Up to this gap it is a near tie."""


@dataclass(frozen=True)
class Verdict:
    """What the verification says of one sample."""

    key: str
    accepted: bool
    reason: str | None = None
    """Short name of the first check that failed, e.g. ``shape``; None when accepted."""
    detail: str = ""
    """One sentence with the figures."""
    receipts: Sequence[Receipt] = ()
    """All ranks' receipts, as evidence."""
    proof: Proof | None = None
    """None where r_L is not captured."""
