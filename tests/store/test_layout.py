"""The layout is what stock zarr writes and any reader opens."""

import json
import warnings
from typing import Any

import numpy as np
import pytest
import zarr
from numcodecs import blosc
from zarr.storage import MemoryStore

from tasks.store import Store, layout
from tasks.store.layout import StateSpec
from tasks.store.stage import stage_states
from tests.store.samples import fill, identity, make


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3"])
@pytest.mark.parametrize("num_tokens", [1, 7, 454, 455, 456, 1000, 32768])
def test_metadata_is_byte_for_byte_what_stock_zarr_writes(dtype: str, num_tokens: int) -> None:
    spec = StateSpec(4, 576, "bfloat16", dtype) if dtype == "float8_e4m3" else StateSpec(4, 576, dtype)
    attributes = {"layout": 1, "sources": ['é "quoted"', '{"ANY": 1}'], "objects": {"a": [1, 2]}}
    record = spec.templates(num_tokens).record(num_tokens, attributes)
    files: dict[str, Any] = {}
    with zarr.config.set({"json_indent": None}), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        group = zarr.create_group(
            MemoryStore(files), attributes={**attributes, "crc32c": json.loads(record)["attributes"]["crc32c"]}
        )
        layout.create_arrays(group, spec, num_tokens, spec.chunk_shape(num_tokens))
        zarr.consolidate_metadata(group.store)
    stock = {path: buffer.to_bytes() for path, buffer in files.items()}
    ours = {f"{n}/zarr.json": spec.templates(num_tokens).array(n, num_tokens) for n in spec.templates(1).arrays}
    assert {**ours, "zarr.json": record} == stock


@pytest.mark.parametrize("num_tokens", [5, 512, 1027])
def test_files_are_what_stock_zarr_writes(store: Store, num_tokens: int) -> None:
    """Byte for byte, but for chunks of states: the frame around them is the same, and they decode alike."""
    sample = make(store.identity, num_tokens)
    fill(store, [sample])
    files: dict[str, Any] = {}
    with zarr.config.set({"json_indent": None, "array.write_empty_chunks": True}):
        group = zarr.create_group(MemoryStore(files))
        layout.create_arrays(group, store.spec, num_tokens, store.spec.chunk_shape(num_tokens))
        group["hidden_states"][:] = sample.states
        group["input_ids"][:] = sample.input_ids
        group["loss_mask"][:] = sample.loss_mask
    directory = store.backend.root / layout.sample_path(sample.key)
    ours = {p: (directory / p).read_bytes() for p in store.spec.files(num_tokens)[:-1]}
    stock = {path: buffer.to_bytes() for path, buffer in files.items() if path != "zarr.json"}
    assert ours.keys() == stock.keys()
    for path, content in stock.items():
        if not path.startswith("hidden_states/c."):
            assert ours[path] == content
            continue
        frames = ours[path][:-4], content[:-4]
        assert frames[0][:12] == frames[1][:12]  # all of the header but the frame's length
        assert blosc.decompress(frames[0]) == blosc.decompress(frames[1])


def test_equal_prefixes_give_equal_chunks(store: Store) -> None:
    long = make(store.identity, 1536)
    objects = [
        stage_states(store.staging(), key * 64, store.spec, long.states[:, :n], long.input_ids[:n])
        for key, n in (("a", 1536), ("b", 1030))
    ]
    shared = [{path: stat for path, stat in o.items() if path.startswith("hidden_states/c.")} for o in objects]
    for depth in range(4):
        equal = [
            shared[0][f"hidden_states/c.{depth}.{j}.0"] == shared[1][f"hidden_states/c.{depth}.{j}.0"]
            for j in (0, 1, 2)
        ]
        assert equal == [True, True, False]


def test_the_grid_fills_whole_code_tables() -> None:
    for hidden_size, tokens in ((7168, 256), (4096, 256), (2048, 256), (576, 455), (896, 292), (64, 512)):
        assert layout.chunk_tokens(hidden_size) == tokens


def test_stock_zarr_walks_the_whole_store_without_a_warning(store: Store) -> None:
    samples = [make(store.identity, n) for n in (1, 300)]
    fill(store, samples)
    root = zarr.open_group(store.url, mode="r")
    assert root.attrs["identity"]["depths"] == [3, 15, 28, 30]
    walked = dict(root.members(max_depth=None))
    for sample in samples:
        path = layout.sample_path(sample.key)
        np.testing.assert_array_equal(walked[f"{path}/hidden_states"][:], sample.states)
        np.testing.assert_array_equal(walked[f"{path}/input_ids"][:], sample.input_ids)
        np.testing.assert_array_equal(walked[f"{path}/loss_mask"][:], sample.loss_mask)
        assert walked[path].attrs["next_token"] == 7


def test_xarray_opens_a_sample_without_a_warning(store: Store) -> None:
    xarray = pytest.importorskip("xarray")
    sample = make(store.identity, 300)
    fill(store, [sample])
    with xarray.open_zarr(f"{store.url}/{layout.sample_path(sample.key)}", chunks=None) as dataset:
        assert dict(dataset.sizes) == {"depth": 4, "token": 300, "hidden": 32}
        np.testing.assert_array_equal(dataset["input_ids"], sample.input_ids)


def test_a_key_is_hex_and_nothing_else() -> None:
    for text in ("../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n"):
        with pytest.raises(ValueError, match="no sample key"):
            layout.sample_path(text)


def test_a_record_that_was_altered_anywhere_is_refused(store: Store) -> None:
    sample = make(identity(), 5)
    fill(store, [sample])
    document = store.backend.read(f"{layout.sample_path(sample.key)}/zarr.json")
    layout.parse_record(document, store.spec)
    for position in range(len(document)):
        altered = bytearray(document)
        altered[position] ^= 1 << (position % 8)
        with pytest.raises(ValueError, match=r"its zarr\.json"):
            layout.parse_record(bytes(altered), store.spec)
