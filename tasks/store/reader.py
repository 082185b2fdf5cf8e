"""Reading: samples as torch tensors, every byte checked.

The fast path reads a sample's files itself instead of through a Zarr library: what those return for a missing
chunk is fill values, and for an altered one without an error depends on the codec. Here a missing, short or
altered file raises :class:`DamagedSample`.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from numcodecs import blosc

from tasks.store import layout
from tasks.store.backend import Files, open_files
from tasks.store.buffers import scratch
from tasks.store.errors import DamagedSample, SampleNotFound
from tasks.store.final_norm import FinalNorm, load_final_norm
from tasks.store.fp8 import dequantize
from tasks.store.integrity import checked_files, load_record, store_problems
from tasks.store.layout import Record, StateSpec
from tasks.store.manifest import Manifest, Source, from_spans
from tasks.store.root import describe, stored_identity
from tasks.store.store import QUARANTINE, RUNS
from tasks.vocabulary import Identity

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Listed:
    """One line of a store's listing."""

    key: str
    num_tokens: int
    shape: tuple[int, int, int]
    """[L, T, H]"""
    depths: tuple[int, ...]
    sources: tuple[str, ...]
    nbytes: int
    """Bytes of all its files."""


@dataclass(frozen=True, eq=False)
class StoredSample:
    """A sample as read."""

    key: str
    source_id: str | None
    """The source id it was asked by, or the first one that shares it; None where none is recorded."""
    depths: tuple[int, ...]
    """Depths that were read, ascending."""
    dtype: str
    """Element type of :attr:`hidden_states`, the one the states were computed in."""
    states_LTH: npt.NDArray[Any]
    """[L, T, H] uint16 with the bits of bfloat16, float32, or uint8 with the bits of float8_e4m3fn."""
    scales_LT: npt.NDArray[np.float32] | None
    """[L, T], of an fp8 store: a state is its float8 times the scale of its row."""
    input_ids_T: npt.NDArray[np.int32]
    loss_mask_T: npt.NDArray[np.bool_]
    """That of the source."""
    next_token: int | None

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids_T)

    @cached_property
    def hidden_states(self) -> "torch.Tensor":
        """[L, T, H] bfloat16 or float32; shares memory with ``states_LTH`` unless that is fp8."""
        import torch

        if self.scales_LT is not None:
            return dequantize(self.states_LTH, self.scales_LT, self.dtype)
        states = torch.from_numpy(self.states_LTH)
        return states.view(torch.bfloat16) if self.dtype == "bfloat16" else states

    @cached_property
    def fp8(self) -> "tuple[torch.Tensor, torch.Tensor]":
        """The states as an fp8 store keeps them: [L, T, H] float8_e4m3fn and the scales [L, T] float32.

        Raises:
            ValueError: the store is not an fp8 store.
        """
        import torch

        if self.scales_LT is None:
            raise ValueError(f"the store keeps its states exactly, in {self.dtype}; only an fp8 store returns fp8")
        return torch.from_numpy(self.states_LTH).view(torch.float8_e4m3fn), torch.from_numpy(self.scales_LT)

    @cached_property
    def input_ids(self) -> "torch.Tensor":
        """[T] int64"""
        import torch

        return torch.from_numpy(self.input_ids_T.astype(np.int64))

    @cached_property
    def loss_mask(self) -> "torch.Tensor":
        """[T] bool"""
        import torch

        return torch.from_numpy(self.loss_mask_T)


class Reader:
    """A store opened for reading. Sees the samples that were recorded when it was opened; see :meth:`refresh`.

    Picklable, and safe to use after a fork: the connection is made in the process that reads.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        """Open the store at a path or URL.

        Raises:
            NotAStore: there is none, or one of a newer layout.
            DamagedStore: its manifest or its root group is torn, altered or lost.
        """
        self.url = os.fspath(url)
        self.attributes = describe(self._files)
        self.identity: Identity = stored_identity(self._files)
        self.spec = StateSpec.of(self.identity)
        self.refresh()

    def refresh(self) -> None:
        """Read the manifest again.

        Raises:
            DamagedStore: it is torn, altered or lost.
        """
        manifest = Manifest(self._files).require_whole()
        self._entries, self._sources = manifest.entries, manifest.sources
        self._keys = list(self._entries)
        self._by_key: dict[str, list[str]] = {}
        for source_id, source in self._sources.items():
            self._by_key.setdefault(source.key, []).append(source_id)

    @property
    def _files(self) -> Files:
        if self.__dict__.get("_process") != os.getpid():
            self.__dict__["_opened"] = open_files(self.url)
            self.__dict__["_process"] = os.getpid()
        opened: Files = self.__dict__["_opened"]
        return opened

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_opened", "_process")}

    # --- listing

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Sequence[str]:
        """Keys in the order they were recorded."""
        return self._keys

    @property
    def source_ids(self) -> Sequence[str]:
        return list(self._sources)

    def sources_of(self, key: str) -> tuple[str, ...]:
        return tuple(self._by_key.get(key, ()))

    def key_of(self, source_id: str) -> str:
        if source_id not in self._sources:
            raise self._not_found(source_id)
        return self._sources[source_id].key

    def num_tokens(self, key: str) -> int:
        return self._entries[key].num_tokens

    def listing(self) -> Iterator[Listed]:
        """The store's samples, from the manifest alone."""
        for key, entry in self._entries.items():
            yield Listed(
                key,
                entry.num_tokens,
                self.identity.shape(entry.num_tokens),
                self.identity.depths,
                self.sources_of(key),
                entry.nbytes,
            )

    def quarantined(self) -> Iterator[dict[str, Any]]:
        """What the verification refused: key, sources, reason, detail, evidence, run and time."""
        for name in self._files.names(QUARANTINE):
            yield json.loads(self._files.read(f"{QUARANTINE}/{name}"))

    def runs(self) -> Iterator[dict[str, Any]]:
        """Provenance of the runs that wrote to the store, oldest first."""
        for name in self._files.names(RUNS):
            yield json.loads(self._files.read(f"{RUNS}/{name}"))

    @cached_property
    def final_norm(self) -> FinalNorm | None:
        """The model's norm after the last layer, where the extraction kept it.

        Raises:
            DamagedStore: it is missing or altered.
        """
        return load_final_norm(self._files, self.attributes)

    def store_problems(self) -> list[str]:
        """What is missing or altered outside of the samples; see :func:`tasks.store.integrity.store_problems`."""
        return list(store_problems(self._files, self.attributes))

    # --- samples

    def __getitem__(self, which: int | str) -> StoredSample:
        """A sample by position, key or source id; as :meth:`read`."""
        return self.read(which)

    def __iter__(self) -> Iterator[StoredSample]:
        return map(self.read, self._keys)

    def read(
        self, which: int | str, depths: Sequence[int] | None = None, out: npt.NDArray[Any] | None = None
    ) -> StoredSample:
        """Read a sample by position, source id or key.

        Args:
            which: A source id, or the position in :attr:`keys` or the key of a sample, which is then read as its
                first source has it. Sources that share a sample differ in their loss masks.
            depths: The depths to return, a subset of the store's in ascending order; all by default. Of samples that
                are longer than a chunk, only these are read.
            out: [L, T, H] of the stored type, to read the states into; its rows [H] must be contiguous.

        Raises:
            SampleNotFound: no such sample.
            DamagedSample: a file is missing, short or altered.
            ValueError: the store lacks one of the depths, or ``out`` does not fit.
        """
        key, source_id, source = self._resolve(which)
        rows = self._rows(depths)
        record = self.record(key)
        states_LTH = self._states_array(record, rows, out)
        small = self._read_files(record, rows, states_LTH)
        input_ids_T = np.frombuffer(small["input_ids/c.0"], dtype="<i4")
        mask_T = np.frombuffer(small["loss_mask/c.0"], dtype=np.int8).astype(np.bool_)
        scales_LT = None
        if self.spec.is_fp8:
            scales_LT = np.frombuffer(small["scales/c.0.0"], dtype="<f4").reshape(-1, record.num_tokens)[rows]
        if source is not None and source.spans is not None:
            mask_T = from_spans(source.spans, record.num_tokens)
        return StoredSample(
            key=key,
            source_id=source_id,
            depths=tuple(self.identity.depths[row] for row in rows),
            dtype=record.dtype,
            states_LTH=states_LTH,
            scales_LT=scales_LT,
            input_ids_T=input_ids_T,
            loss_mask_T=mask_T,
            next_token=record.next_token,
        )

    def tokens(self, which: int | str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Token ids [T] and loss mask [T] alone, as :meth:`read`; the states are not read."""
        key, _, source = self._resolve(which)
        record = self.record(key)
        ids, mask = (
            bytes(data[:-4]) for _, data in checked_files(self._files, record, ["input_ids/c.0", "loss_mask/c.0"])
        )
        mask_T = np.frombuffer(mask, dtype=np.int8).astype(np.bool_)
        if source is not None and source.spans is not None:
            mask_T = from_spans(source.spans, record.num_tokens)
        return np.frombuffer(ids, dtype="<i4"), mask_T

    def mask_digest(self, which: int | str) -> str:
        """Digest by which the loss mask of a sample or of a source is told from others; from the manifest alone."""
        key, _, source = self._resolve(which)
        if source is None or source.spans is None:
            return self._entries[key].mask
        return layout.mask_digest(from_spans(source.spans, self._entries[key].num_tokens))

    def record(self, key: str) -> Record:
        """The sample's completion record, checked against itself and against this store.

        Raises:
            SampleNotFound: it is not committed.
            DamagedSample: it is not what was committed.
        """
        entry = self._entries.get(key)
        try:
            record = load_record(self._files, key, self.identity)
        except FileNotFoundError:
            if entry is not None:
                raise DamagedSample(key, "its zarr.json is missing") from None
            raise SampleNotFound(f"{self.url} has no sample {key}") from None
        if entry is not None and entry.num_tokens != record.num_tokens:
            raise DamagedSample(key, f"it has {record.num_tokens} tokens, and {entry.num_tokens} in the manifest")
        return record

    def _resolve(self, which: int | str) -> tuple[str, str | None, Source | None]:
        if not isinstance(which, str):
            which = self._keys[which]
        elif which not in self._sources and not layout.is_key(which):
            raise self._not_found(which)
        source_id = which if which in self._sources else next(iter(self._by_key.get(which, ())), None)
        if source_id is None:
            return which, None, None
        source = self._sources[source_id]
        return source.key, source_id, source

    def _not_found(self, which: str) -> SampleNotFound:
        return SampleNotFound(f"{self.url} has no sample with source id or key {which!r}")

    def check_depths(self, depths: Sequence[int]) -> None:
        """Raise ValueError where the store lacks one of the depths, or their order is not ascending."""
        absent = [depth for depth in depths if depth not in self.identity.depths]
        if absent or list(depths) != sorted(set(depths)) or not depths:
            raise ValueError(f"depths {list(depths)}: choose from {list(self.identity.depths)}, ascending, each once")

    def _rows(self, depths: Sequence[int] | None) -> list[int]:
        if depths is None:
            depths = self.identity.depths
        self.check_depths(depths)
        return [self.identity.depths.index(depth) for depth in depths]

    def _states_array(self, record: Record, rows: Sequence[int], out: npt.NDArray[Any] | None) -> npt.NDArray[Any]:
        shape = (len(rows), record.num_tokens, self.spec.hidden_size)
        if out is None:
            return np.empty(shape, dtype=self.spec.stored_dtype)
        if out.shape != shape or out.dtype != self.spec.stored_dtype:
            raise ValueError(
                f"the states are {list(shape)} {self.spec.stored_dtype}, `out` is {list(out.shape)} {out.dtype}"
            )
        return out

    def _read_files(self, record: Record, rows: Sequence[int], states_LTH: npt.NDArray[Any]) -> dict[str, bytes]:
        """Read the files of a sample that hold these depths, checked: the states, and the small arrays by path."""
        spec, num_tokens = self.spec, record.num_tokens
        is_long = spec.is_long(num_tokens)
        tiles = {t.path: t for t in spec.tiles(num_tokens) if not is_long or t.depths.start in rows}
        others = [path for path in record.objects if not path.startswith("hidden_states/c.")]
        chunk_shape = spec.chunk_shape(num_tokens)
        small: dict[str, bytes] = {}
        for path, data in checked_files(self._files, record, [*others, *tiles]):
            content = data[:-4]  # without the codec's own checksum, which the record's covers
            if path not in tiles:
                if not path.endswith("zarr.json"):
                    small[path] = bytes(content)
                continue
            tile = tiles[path]
            target = states_LTH[rows.index(tile.depths.start)][None, tile.tokens] if is_long else states_LTH
            in_place = target.shape == chunk_shape and target.flags.c_contiguous
            chunk = target if in_place else self._scratch(chunk_shape)
            try:
                blosc.decompress(content, chunk)
            except (RuntimeError, ValueError) as error:
                raise DamagedSample(record.key, f"{path} does not decode") from error
            if is_long and not in_place:
                target[:] = chunk[:, : target.shape[1]]
            elif not in_place:
                for into, row in enumerate(rows):
                    target[into] = chunk[row]
        return small

    def _scratch(self, shape: tuple[int, int, int]) -> npt.NDArray[Any]:
        dtype = self.spec.stored_dtype
        return scratch("chunk", math.prod(shape) * dtype.itemsize).view(dtype).reshape(shape)


def open_store(url: str | os.PathLike[str]) -> Reader:
    """Open a store for reading: ``tasks.store.open``."""
    return Reader(url)
