"""Staging: a sample's data files are encoded and written where no reader looks.

Runs in the engine's worker process, in its writer threads. Encoding, checksums and writes release the GIL.
"""

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Executor, wait
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt

from tasks.store.errors import storage_failures
from tasks.store.fp8 import Quantizer
from tasks.store.layout import StateSpec, Tile, check_key, seal
from tasks.store.links import content_name, links_in
from tasks.vocabulary import ChunkGone, SharedChunk, Sharing

STAGE = "tasks.store.stage:stage_states"
"""The name by which the engine's worker processes find :func:`stage_states`."""

# The commit brings all files of many samples to the disk at once. The disk is told to begin with larger ones when
# they are written, so that the page cache does not fill up with states and the commit has little to wait for.
_BEGIN_BYTES = 1 << 18
_MOST_PARTS = 1024  # of one system call


def stage_states(
    staging: str | Path,
    key: str,
    spec: StateSpec | Mapping[str, Any],
    states_LTH: npt.NDArray[Any],
    input_ids: npt.ArrayLike,
    executor: Executor | None = None,
) -> dict[str, tuple[int, int]]:
    """Encode a sample and write its data files under ``staging/key/``; the completion record is not among them.

    Staging a key again replaces what was staged before. Memory beyond the states is one chunk a thread.

    Args:
        staging: Directory from :meth:`tasks.store.Store.staging`.
        key: The sample's key.
        spec: :class:`StateSpec` of the store, or what :meth:`tasks.store.Store.stage_spec` gives, with ``sharing`` what
            the sample has in common with others: whole chunks within it are links to one file.
        states_LTH: [L, T, H] uint16 with the bits of bfloat16, or float32, as ``spec.dtype`` says; rows that are
            ``elsewhere`` may be anything.
        input_ids: [T], the token ids that the states belong to.
        executor: Encodes stretches of a long sample in parallel where given; must not be the caller's own pool.

    Returns:
        {path relative to the sample: (bytes, crc32c)} of each file written.

    Raises:
        ValueError: shape or element type differs from the spec.
        ChunkGone: a chunk that was to be linked is not there; the sample must be staged with all its rows.
        StorageFailure: the disk is full, read-only or not permitted.
    """
    links, sharing = None, Sharing()
    if not isinstance(spec, StateSpec):
        values = dict(spec)
        directory_of_links, sharing = values.pop("links", None), values.pop("sharing", sharing)
        links = links_in(directory_of_links) if directory_of_links else None
        spec = StateSpec(**values)
    ids_T = np.ascontiguousarray(input_ids, dtype="<i4")
    num_tokens = len(ids_T)
    if states_LTH.shape != spec.shape(num_tokens) or num_tokens == 0:
        raise ValueError(f"states have shape {states_LTH.shape}, the store needs {spec.shape(num_tokens)}")
    if states_LTH.dtype != spec.given_dtype:
        raise ValueError(f"states are {states_LTH.dtype}, the store takes {spec.dtype} as {spec.given_dtype}")

    templates = spec.templates(num_tokens)
    directory = f"{os.fspath(staging)}/{check_key(key)}"
    written: dict[str, tuple[int, int]] = {}

    def write(path: str, *parts: bytes) -> None:
        written[path] = write_file(f"{directory}/{path}", *parts)

    def write_array(name: str, chunk: str, values: npt.NDArray[Any]) -> None:
        os.makedirs(f"{directory}/{name}", exist_ok=True)  # noqa: PTH103
        write(f"{name}/zarr.json", templates.array(name, num_tokens))
        write(f"{name}/{chunk}", seal(values.tobytes()))

    quantizer = Quantizer(spec, num_tokens) if spec.is_fp8 else None

    def write_tile(tile: Tile) -> tuple[int, int]:
        rows_ltH = states_LTH[tile.depths, tile.tokens]
        if quantizer:
            rows_ltH = quantizer(rows_ltH, tile)
        path = f"{directory}/{tile.path}"

        def encode() -> tuple[int, int]:
            parts, crc = spec.encode(_pad(rows_ltH, spec, num_tokens))
            return write_file(path, *parts, crc=crc)

        whole = spec.is_long(num_tokens) and rows_ltH.shape == spec.chunk_shape(num_tokens)
        if not (links and whole and tile.tokens.stop <= sharing.tokens):
            return encode()
        name = content_name(rows_ltH)
        written_as = links.share(name, path, encode)
        if links.possible and quantizer is None:  # whose scales come of the rows
            sharing.chunks[tile.path] = SharedChunk(name, tile.tokens.start, tile.tokens.stop, rows_ltH.shape[0])
        return written_as

    def write_tiles(some: Iterable[Tile]) -> dict[str, tuple[int, int]]:
        return {tile.path: write_tile(tile) for tile in some}

    with storage_failures(directory):
        # Plain strings here and below: for small samples, pathlib takes as long as the system calls.
        os.makedirs(f"{directory}/hidden_states", exist_ok=True)  # noqa: PTH103
        write("hidden_states/zarr.json", templates.array("hidden_states", num_tokens))
        own: list[Tile] = []
        elsewhere: dict[tuple[int, int], list[Tile]] = {bounds: [] for bounds in sharing.elsewhere}
        for tile in spec.tiles(num_tokens):
            elsewhere.get((tile.tokens.start, tile.tokens.stop), own).append(tile)
        for (start, stop), tiles in elsewhere.items():
            if links is None or not tiles:
                raise ChunkGone(f"tokens [{start}, {stop}) are no chunk that can be linked here")
        # All depths of some tokens together: to hand a task to a thread takes the interpreter's lock a dozen times, for
        # which as many threads wait.
        stretches: dict[int, list[Tile]] = {}
        for tile in own:
            stretches.setdefault(tile.tokens.start, []).append(tile)
        if executor is None or len(stretches) < 2:
            written.update(write_tiles(own))
        else:
            futures = [executor.submit(write_tiles, stretch) for stretch in stretches.values()]
            wait(futures)  # even when one fails: the caller may overwrite the states once this has returned
            for future in futures:
                written.update(future.result())
        # Last: those who stage them may not be done yet, and none of them waits for this sample's own chunks so long.
        linked = sharing.linked()
        for tile in (tile for tiles in elsewhere.values() for tile in tiles):
            chunk = linked.get(tile.path)
            if links is None or chunk is None or tile.tokens != slice(chunk.start, chunk.stop):
                raise ChunkGone(f"{tile.path} was to be linked to, and was not staged")
            written[tile.path] = links.link(chunk.name, f"{directory}/{tile.path}")
        if quantizer:
            write_array("scales", "c.0.0", quantizer.scales_LT)
            write_array("quantization_error", "c.0.0", quantizer.error_L2)
        write_array("input_ids", "c.0", ids_T)
    return written


def _pad(rows_ltH: npt.NDArray[Any], spec: StateSpec, num_tokens: int) -> npt.NDArray[Any]:
    """A chunk, contiguous; padded with the fill value where the sample ends inside it."""
    shape = spec.chunk_shape(num_tokens)
    if rows_ltH.shape == shape:
        return np.ascontiguousarray(rows_ltH)
    padded = np.full(shape, spec.fill_value, dtype=spec.stored_dtype)
    padded[:, : rows_ltH.shape[1]] = rows_ltH
    return padded


def write_file(path: str, *parts: bytes, crc: int | None = None) -> tuple[int, int]:
    """Write a file in place of one that may be there; returns its bytes and crc32c, which is computed unless known."""
    if crc is None:
        crc = 0
        for part in parts:
            crc = google_crc32c.extend(crc, part)
    size = sum(map(len, parts))
    # Never into a file that is there: it may be a link to a chunk of other samples.
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    except FileExistsError:
        os.unlink(path)  # noqa: PTH108
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        left = [memoryview(part) for part in parts]
        while left:
            written = os.writev(descriptor, left[:_MOST_PARTS])
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        if size >= _BEGIN_BYTES and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # on Linux, starts writing back
    finally:
        os.close(descriptor)
    return size, crc
