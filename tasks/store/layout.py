"""Layout v1: what a store's files are named and what is in them.

::

    STORE/zarr.json                          root group: identity, codec, grid, final norm's eps
    STORE/final_norm_weight/                 [H], where the extraction gave it
    STORE/samples/<key[:2]>/<key>/           one group a sample
        zarr.json                            the completion record, written last (see below)
        hidden_states/{zarr.json, c.l.j.0}   [L, T, H] uint16, the bits of bfloat16; or float32; or uint8 (fp8)
        input_ids/{zarr.json, c.0}           [T] int32
        loss_mask/{zarr.json, c.0}           [T] int8, 1 where a trainer supervises the token
        scales/{zarr.json, c.0.0}            [L, T] float32, with fp8 only
        quantization_error/{zarr.json, c.0.0}  [L, 2] float32, with fp8 only
    STORE/.layertap/                         private: manifest, copy of the root, staging, quarantine, ...

L captured depths (ascending), T tokens of the sample, H hidden size. All is Zarr v3 and opens in any reader of it.

* A sample of at most C tokens has its states in one chunk [L, T, H], so that small samples are few files. A longer
  one has chunks [1, C, H], which decode straight into place and let a reader fetch the depths it needs; the last of
  a depth is padded with the fill value, which compresses to next to nothing. C is near 256 and the same for all
  samples of a store (:func:`chunk_tokens`), so long samples with equal prefixes have equal chunks. In a local store
  these are hard links to one file (:mod:`tasks.store.links`); an object store has no such thing, and holds copies.
* Codecs: ``blosc(zstd, level 1, byte shuffle, 4 MiB blocks)`` then ``crc32c``; what is written has better settings of
  zstd than that level's (:mod:`tasks.store.blosc_frame`). zstd gives every 128 KiB a code table of its own, so C is
  chosen for a chunk's plane of exponent bytes (C x H of them) to fill whole tables: at level 1, 1.45 instead of 1.41
  on real states with H = 576. With blosc's default block size it would be 1.28.
* Fill values are sentinels that no valid sample holds: NaN for states, -1 for ids and mask. A reader that ignores
  a missing chunk shows them; our own reader raises.
* bfloat16 is no Zarr data type that readers agree on, so its bits are stored as uint16 with the attribute
  ``logical_dtype: bfloat16``; ``torch.from_numpy(a).view(torch.bfloat16)`` gives them back without a copy.

* An fp8 store (``stored_as: float8_e4m3``) keeps the bits of ``value / scale`` as float8_e4m3fn, the scale being the
  row's largest magnitude / 448. ``quantization_error`` holds, per depth, |stored - computed| / |computed| of a row
  (Euclidean norms over H): the mean over the rows, and the worst row.

The group's ``zarr.json`` carries consolidated metadata and these attributes: ``layout``, ``key``, ``identity``
(digest), ``num_tokens``, ``depths``, ``dtype``, ``stored_as``, ``next_token`` (what the engine sampled greedily after
the sample), ``sources`` ({source id: null, or its own loss mask as [start, end, ...]} as of the commit), ``mask``
(digest of the loss mask), ``run``, ``capture`` (what the verification recorded), ``objects`` ({path: [bytes, crc32c]}
of every other file) and ``crc32c`` of the document itself, computed with the eight digits of that value set to zero.
A sample is committed when that file is there.
"""

import hashlib
import json
import re
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import numpy.typing as npt
import zarr
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from tasks.store import blosc_frame
from tasks.vocabulary import Identity

LAYOUT = 1
PRIVATE = ".layertap"
RECORD = "zarr.json"
"""Name of a group's metadata file; a sample's is its completion record."""

_TABLE_BYTES = 128 * 1024
CRC_BYTES = 4
_KEY = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")

# Stand-ins for what differs between samples of a store. zarr writes the templates with them.
_ANY_LENGTH = 910_000_000_001
_ANY_ATTRIBUTES = {"ANY": "ATTRIBUTES"}
_template_lock = threading.Lock()


def is_key(text: str) -> bool:
    return _KEY.fullmatch(text) is not None


def is_shard(name: str) -> bool:
    """Whether it is the name of a group in ``samples``: what keys begin with."""
    return _SHARD.fullmatch(name) is not None


def check_key(key: str) -> str:
    """Return the key; anything but 64 lower-case hex digits, which alone ever become a path, is refused."""
    if not is_key(key):
        raise ValueError(f"{key!r} is no sample key (64 lower-case hex digits)")
    return key


def sample_path(key: str) -> str:
    """Directory of a sample relative to the store."""
    return f"samples/{key[:2]}/{check_key(key)}"


def mask_digest(loss_mask: npt.ArrayLike) -> str:
    """Digest (16 hex digits) by which two loss masks of one sample are told apart."""
    return hashlib.blake2b(np.asarray(loss_mask, dtype=np.bool_).tobytes(), digest_size=8).hexdigest()


def seal(content: bytes) -> bytes:
    """Bytes as a ``crc32c`` codec without another one stores them."""
    checksum: bytes = google_crc32c.value(content).to_bytes(CRC_BYTES, "little")
    return content + checksum


def chunk_tokens(hidden_size: int) -> int:
    """Tokens of a chunk of the grid: near 256, with a byte plane just under a multiple of 128 KiB; at most 512.

    At least two tables, since zstd's first level, which was used once, does less well in blocks of up to 256 KiB.
    """
    tables = max(2, round(256 * hidden_size / _TABLE_BYTES))
    return min(512, tables * _TABLE_BYTES // hidden_size)


class Tile(NamedTuple):
    """A chunk of a sample's states: its file, and its place in [L, T, H]."""

    path: str
    depths: slice
    tokens: slice


@dataclass(frozen=True)
class StateSpec:
    """What decides how the states of a store are encoded; small and plain, so that it travels to workers."""

    num_depths: int
    hidden_size: int
    dtype: str
    """Element type as computed, ``bfloat16`` or ``float32``."""
    stored_as: str = "exact"
    """``exact`` or ``float8_e4m3``."""

    @classmethod
    def of(cls, identity: Identity) -> "StateSpec":
        return cls(len(identity.depths), identity.hidden_size, identity.dtype, identity.stored_as)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def is_fp8(self) -> bool:
        return self.stored_as == "float8_e4m3"

    @property
    def given_dtype(self) -> "np.dtype[Any]":
        """numpy type of the states handed over for storing."""
        return np.dtype("<f4") if self.dtype == "float32" else np.dtype("<u2")

    @property
    def stored_dtype(self) -> "np.dtype[Any]":
        """numpy type of the elements in the files."""
        return np.dtype("u1") if self.is_fp8 else self.given_dtype

    @property
    def logical_dtype(self) -> str:
        """What the bits in the files mean."""
        return "float8_e4m3fn" if self.is_fp8 else self.dtype

    @property
    def fill_value(self) -> float | int:
        """A NaN in each type."""
        if self.is_fp8:
            return 0x7F
        return float("nan") if self.dtype == "float32" else 0x7FC0

    @property
    def is_shuffled(self) -> bool:
        """Whether the bytes of elements are sorted by their place; with single bytes that changes nothing."""
        return not self.is_fp8

    @cached_property
    def chunk_tokens(self) -> int:
        """C, tokens of a chunk of the grid."""
        return chunk_tokens(self.hidden_size)

    def is_long(self, num_tokens: int) -> bool:
        """Whether a sample is cut into chunks of one depth and C tokens."""
        return num_tokens > self.chunk_tokens

    def chunk_shape(self, num_tokens: int) -> tuple[int, int, int]:
        """Shape of the chunks of a sample's states."""
        return (1, self.chunk_tokens, self.hidden_size) if self.is_long(num_tokens) else self.shape(num_tokens)

    def tiles(self, num_tokens: int) -> list[Tile]:
        """The chunks of a sample's states, depth by depth."""
        depths, tokens, _ = self.chunk_shape(num_tokens)
        return [
            Tile(
                f"hidden_states/c.{row}.{column}.0",
                slice(row * depths, (row + 1) * depths),
                slice(column * tokens, min((column + 1) * tokens, num_tokens)),
            )
            for row in range(self.num_depths // depths)
            for column in range(-(-num_tokens // tokens))
        ]

    def shape(self, num_tokens: int) -> tuple[int, int, int]:
        return self.num_depths, num_tokens, self.hidden_size

    def nbytes(self, num_tokens: int) -> int:
        """Bytes of a sample's states as computed."""
        return self.num_depths * num_tokens * self.hidden_size * self.given_dtype.itemsize

    def files(self, num_tokens: int) -> tuple[str, ...]:
        """Paths, relative to the sample, of all its files in a fixed order, the completion record last."""
        depths, tokens, _ = self.chunk_shape(num_tokens)
        return _files(self.num_depths // depths, -(-num_tokens // tokens), self.is_fp8)

    def staged_files(self, num_tokens: int) -> tuple[str, ...]:
        """The part of :meth:`files` that exists before the commit: all but the loss mask and the record."""
        return self.files(num_tokens)[: -len(_MASK_PATHS) - 1]

    def encode(self, tile: npt.NDArray[Any]) -> tuple[list[bytes], int]:
        """Encode one chunk: its file in parts, of which the last is a checksum of the others, and the crc32c of all."""
        parts = blosc_frame.compress(tile, shuffle=self.is_shuffled)
        crc = 0
        for part in parts:
            crc = google_crc32c.extend(crc, part)
        checksum: bytes = crc.to_bytes(CRC_BYTES, "little")
        return [*parts, checksum], google_crc32c.extend(crc, checksum)

    def templates(self, num_tokens: int) -> "Templates":
        """Metadata documents of a sample with this many tokens."""
        return self._templates[self.is_long(num_tokens)]

    @cached_property
    def _templates(self) -> "tuple[Templates, Templates]":
        return _templates(self, False), _templates(self, True)


@dataclass(frozen=True)
class Templates:
    """Metadata documents as the installed zarr writes them, with stand-ins where samples differ."""

    arrays: Mapping[str, str]
    group: str

    @property
    def codecs(self) -> Any:
        """Codecs of the states, as Zarr names them."""
        return json.loads(self.arrays["hidden_states"])["codecs"]

    def array(self, name: str, num_tokens: int) -> bytes:
        """``zarr.json`` of an array of a sample."""
        return self.arrays[name].replace(str(_ANY_LENGTH), str(num_tokens)).encode()

    def record(self, num_tokens: int, attributes: Mapping[str, Any]) -> bytes:
        """The group's ``zarr.json``, the completion record, with its own checksum filled in."""
        unsigned = json.dumps({**attributes, "crc32c": "0" * 8})
        sized = self.group.replace(str(_ANY_LENGTH), str(num_tokens))
        document = sized.replace(json.dumps(_ANY_ATTRIBUTES), unsigned, 1).encode()
        checksum = f"{google_crc32c.value(document):08x}"
        signed = unsigned[: unsigned.rindex("0" * 8)] + checksum + '"}'
        return document.replace(unsigned.encode(), signed.encode(), 1)


def create_arrays(group: zarr.Group, spec: StateSpec, num_tokens: int, chunk_shape: tuple[int, ...]) -> None:
    """Create a sample's arrays in a Zarr group with stock zarr: the definition of the layout."""
    group.create_array(
        "hidden_states",
        shape=spec.shape(num_tokens),
        chunks=chunk_shape,
        dtype=spec.stored_dtype,
        compressors=[
            BloscCodec(
                typesize=spec.stored_dtype.itemsize,
                cname="zstd",
                clevel=1,
                shuffle="shuffle" if spec.is_shuffled else "noshuffle",
                blocksize=blosc_frame.BLOCK_BYTES,
            ),
            Crc32cCodec(),
        ],
        fill_value=spec.fill_value,
        dimension_names=("depth", "token", "hidden"),
        chunk_key_encoding={"name": "default", "separator": "."},
        attributes={"logical_dtype": spec.logical_dtype},
    )
    if spec.is_fp8:
        for name, shape, dimensions in (
            ("scales", (spec.num_depths, num_tokens), ("depth", "token")),
            ("quantization_error", (spec.num_depths, 2), ("depth", "measure")),
        ):
            group.create_array(
                name,
                shape=shape,
                chunks=shape,
                dtype="<f4",
                compressors=[Crc32cCodec()],
                fill_value=float("nan"),
                dimension_names=dimensions,
                chunk_key_encoding={"name": "default", "separator": "."},
            )
    for name, dtype in (("input_ids", "<i4"), ("loss_mask", "i1")):
        group.create_array(
            name,
            shape=(num_tokens,),
            chunks=(num_tokens,),
            dtype=dtype,
            compressors=[Crc32cCodec()],
            fill_value=-1,
            dimension_names=("token",),
            chunk_key_encoding={"name": "default", "separator": "."},
        )


@lru_cache
def _templates(spec: StateSpec, is_long: bool) -> Templates:
    files: dict[str, Any] = {}
    with _template_lock, zarr.config.set({"json_indent": None}), warnings.catch_warnings():
        # Consolidated metadata is an extension that readers without it ignore (must_understand: false).
        warnings.filterwarnings("ignore", message="Consolidated metadata")
        store = MemoryStore(files)
        group = zarr.create_group(store, attributes=dict(_ANY_ATTRIBUTES))
        create_arrays(
            group,
            spec,
            _ANY_LENGTH,
            (1, spec.chunk_tokens, spec.hidden_size) if is_long else spec.shape(_ANY_LENGTH),
        )
        zarr.consolidate_metadata(store)
    text = {path: buffer.to_bytes().decode() for path, buffer in files.items()}
    group_text = text.pop(RECORD)
    return Templates({path.removesuffix("/" + RECORD): document for path, document in text.items()}, group_text)


_FP8_PATHS = ("scales/zarr.json", "scales/c.0.0", "quantization_error/zarr.json", "quantization_error/c.0.0")
_MASK_PATHS = ("loss_mask/zarr.json", "loss_mask/c.0")


@lru_cache(maxsize=4096)
def _files(rows: int, columns: int, is_fp8: bool) -> tuple[str, ...]:
    return (
        "hidden_states/zarr.json",
        *(f"hidden_states/c.{row}.{column}.0" for row in range(rows) for column in range(columns)),
        *(_FP8_PATHS if is_fp8 else ()),
        "input_ids/zarr.json",
        "input_ids/c.0",
        *_MASK_PATHS,
        RECORD,
    )


@dataclass(frozen=True)
class Record:
    """A sample's completion record, parsed and found consistent with itself."""

    key: str
    identity: str
    num_tokens: int
    depths: tuple[int, ...]
    dtype: str
    stored_as: str
    next_token: int | None
    sources: Mapping[str, tuple[int, ...] | None]
    """Source ids as of the commit, each with its own loss mask as starts and ends where that differs."""
    mask: str
    run: str
    capture: Mapping[str, Any]
    quantization_error: tuple[float, ...] | None
    """Per depth the mean relative error of a row, with fp8."""
    objects: Mapping[str, tuple[int, int]]
    """{path: (bytes, crc32c)} of all other files, in the order of :meth:`StateSpec.files`."""
    nbytes: int
    """Size of the record itself."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the files in the order of :meth:`StateSpec.files`."""
        return *(size for size, _ in self.objects.values()), self.nbytes


class OtherIdentity(ValueError):
    """A completion record is in order, but not of the identity that was asked for."""


def record_attributes(document: bytes) -> dict[str, Any]:
    """Attributes of a sample's ``zarr.json``, which is checked against its own checksum.

    Raises:
        ValueError: not JSON, or not byte for byte what was committed.
    """
    try:
        attributes = json.loads(document)["attributes"]
        checksum = attributes["crc32c"].encode()
        head, tail = document.split(b'"crc32c": "' + checksum + b'"}', 1)
        unsigned = head + b'"crc32c": "00000000"}' + tail
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError("its zarr.json is not a completion record") from error
    if f"{google_crc32c.value(unsigned):08x}".encode() != checksum:
        raise ValueError("its zarr.json does not match the checksum within")
    if attributes["layout"] != LAYOUT:
        raise ValueError(f"it has layout {attributes['layout']}, this version reads {LAYOUT}")
    return dict(attributes)


def parse_record(document: bytes, spec: StateSpec, identity: str | None = None) -> Record:
    """Parse a sample's ``zarr.json`` and check it against its own checksum.

    Args:
        document: its content.
        spec: of the store.
        identity: digest that it must name.

    Raises:
        OtherIdentity: it names another.
        ValueError: not JSON, or not byte for byte what was committed.
    """
    attributes = record_attributes(document)
    if identity is not None and attributes["identity"] != identity:
        raise OtherIdentity("it is of another extraction than the store's zarr.json says")
    listed = attributes["objects"]
    paths = spec.files(attributes["num_tokens"])[:-1]
    if set(listed) != set(paths):
        raise ValueError("its list of files does not fit its length")
    return Record(
        key=attributes["key"],
        identity=attributes["identity"],
        num_tokens=attributes["num_tokens"],
        depths=tuple(attributes["depths"]),
        dtype=attributes["dtype"],
        stored_as=attributes["stored_as"],
        next_token=attributes["next_token"],
        sources={source: None if spans is None else tuple(spans) for source, spans in attributes["sources"].items()},
        mask=attributes["mask"],
        run=attributes["run"],
        capture=attributes["capture"],
        quantization_error=tuple(attributes["quantization_error"]) if "quantization_error" in attributes else None,
        objects={path: (listed[path][0], listed[path][1]) for path in paths},
        nbytes=len(document),
    )


def root_document(attributes: Mapping[str, Any]) -> bytes:
    """``zarr.json`` of the root group."""
    files: dict[str, Any] = {}
    zarr.create_group(MemoryStore(files), attributes=dict(attributes))
    return bytes(files[RECORD].to_bytes())


@cache
def group_document() -> bytes:
    """``zarr.json`` of a plain group."""
    return root_document({})


def is_group(document: bytes | None) -> bool:
    """Whether this is ``zarr.json`` of a plain group, whichever version of zarr wrote it."""
    try:
        content = json.loads(document or b"")
    except ValueError:
        return False
    plain: dict[str, Any] = json.loads(group_document())
    return bool(content == plain)


def array_documents(
    values: npt.NDArray[Any], dimension_names: Sequence[str], attributes: Mapping[str, Any]
) -> dict[str, bytes]:
    """Files of a small array in one chunk, relative to the array, as stock zarr writes them."""
    files: dict[str, Any] = {}
    with zarr.config.set({"array.write_empty_chunks": True}):
        zarr.create_array(
            MemoryStore(files),
            data=values,
            chunks=tuple(max(1, n) for n in values.shape),
            compressors=[Crc32cCodec()],
            dimension_names=list(dimension_names),
            chunk_key_encoding={"name": "default", "separator": "."},
            attributes=dict(attributes),
        )
    return {path: bytes(buffer.to_bytes()) for path, buffer in files.items()}
