"""Readers beyond our own, the PyTorch data set, fp8, and figures about a store."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import torch
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import tasks.store
from tasks.store import DamagedSample, DamagedStore, FinalNorm, NoSpace, SourceRecord, StorageFailure, Store
from tasks.store.dataset import LengthBucketedBatches, SampleDataset, collate
from tasks.store.layout import sample_path, seal
from tasks.store.maintenance import preflight, stats, verify
from tasks.store.relay import Relay
from tests.store.samples import Made, fill, identity, make, stage

LENGTHS = (5, 600, 7, 513, 30, 64)


def filled(url: str | Path, **changes: Any) -> list[Made]:
    samples = [make(identity(**changes), n, seed=i) for i, n in enumerate(LENGTHS)]
    with Store.open(url, identity(**changes)) as store:
        fill(store, samples)
    return samples


@pytest.mark.parametrize("stored_as", ["exact", "float8_e4m3"])
def test_tensorstore_reads_every_array(tmp_path: Path, stored_as: str) -> None:
    samples = filled(tmp_path, stored_as=stored_as)
    group = zarr.open_group(tmp_path, mode="r")
    for sample in samples:
        for name, array in group[sample_path(sample.key)].arrays():
            kvstore = {"driver": "file", "path": f"{tmp_path}/{sample_path(sample.key)}/{name}"}
            read = tensorstore.open({"driver": "zarr3", "kvstore": kvstore}).result().read().result()
            np.testing.assert_array_equal(read, array[:])


def test_zarrs_reads_a_sample(tmp_path: Path) -> None:
    """In a process of its own, since zarrs is switched on for all of zarr."""
    samples = filled(tmp_path)
    script = (
        "import sys, warnings; warnings.simplefilter('error'); import zarr, zarrs, numpy as np;"
        "zarr.config.set({'codec_pipeline.path': 'zarrs.ZarrsCodecPipeline'});"
        "g = zarr.open_group(sys.argv[1], mode='r'); np.save(sys.argv[2], g['hidden_states'][:])"
    )
    place = tmp_path / sample_path(samples[1].key)
    subprocess.run([sys.executable, "-c", script, place, tmp_path / "read.npy"], check=True)
    np.testing.assert_array_equal(np.load(tmp_path / "read.npy"), samples[1].states)


@pytest.mark.parametrize(("context", "workers"), [("fork", 2), ("spawn", 1)])
@pytest.mark.parametrize("place", ["local", "s3"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_the_data_set_in_workers(
    tmp_path: Path, request: pytest.FixtureRequest, place: str, context: str, workers: int
) -> None:
    url = str(tmp_path / "store") if place == "local" else request.getfixturevalue("s3")()
    samples = {s.key: s for s in filled(url)}
    data = SampleDataset(url, depths=(15, 30))
    batches = LengthBucketedBatches(data.lengths, 1300, seed=1)
    seen = []
    for batch in DataLoader(
        data,
        batch_sampler=batches,
        collate_fn=collate,
        num_workers=workers,
        multiprocessing_context=context,
        timeout=120,
    ):
        for row, key in enumerate(batch["keys"]):
            length = int(batch["lengths"][row])
            states = batch["hidden_states"][row]
            assert states.dtype == torch.bfloat16
            np.testing.assert_array_equal(states[:, :length].view(torch.uint16), samples[key].states[[1, 3]])
            assert not states[:, length:].any()
            np.testing.assert_array_equal(batch["input_ids"][row, :length], samples[key].input_ids)
            np.testing.assert_array_equal(batch["loss_mask"][row, :length], samples[key].loss_mask)
            seen.append(key)
    assert sorted(seen) == sorted(samples)


def test_the_data_set_by_source_and_by_key(tmp_path: Path) -> None:
    (sample,) = [make(identity(), 9)]
    with Store.open(tmp_path, identity()) as store:
        store.commit([stage(store, sample)])
        store.record(SourceRecord(name, sample.key, mask) for name, mask in (("a", [0] * 9), ("b", [1] * 9)))
    by_source, by_key = SampleDataset(tmp_path), SampleDataset(tmp_path, by="key")
    assert [item["source_id"] for item in map(by_source.__getitem__, range(2))] == ["a", "b"]
    assert [bool(item["loss_mask"].any()) for item in map(by_source.__getitem__, range(2))] == [False, True]
    assert (len(by_key), by_key[0]["key"]) == (1, sample.key)
    with pytest.raises(ValueError, match="choose from"):
        SampleDataset(tmp_path, depths=[1])


def test_damage_reaches_the_training_loop(tmp_path: Path) -> None:
    samples = filled(tmp_path)
    (tmp_path / sample_path(samples[2].key) / "hidden_states/c.0.0.0").unlink()
    loader = DataLoader(SampleDataset(tmp_path), batch_size=None, num_workers=1)
    with pytest.raises(DamagedSample, match=r"c\.0\.0\.0 is missing"):
        list(loader)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.integers(1, 500), max_size=60),
    st.integers(500, 4000),
    st.one_of(st.none(), st.integers(1, 9)),
    st.integers(1, 4),
    st.booleans(),
    st.integers(1, 50),
)
def test_batches_keep_to_the_budget_and_miss_nothing(
    lengths: list[int], budget: int, most: int | None, world: int, shuffle: bool, bucket: int
) -> None:
    ranks = [
        LengthBucketedBatches(
            lengths, budget, max_samples=most, bucket=bucket, shuffle=shuffle, rank=rank, world_size=world
        )
        for rank in range(world)
    ]
    steps = {len(rank) for rank in ranks}
    assert len(steps) == 1
    batches = [batch for rank in ranks for batch in rank]
    for batch in batches:
        assert len(batch) * max(lengths[i] for i in batch) <= budget
        assert most is None or len(batch) <= most
    assert {i for batch in batches for i in batch} == set(range(len(lengths)))
    if world == 1:
        assert sum(map(len, batches)) == len(lengths)


def test_batches_change_with_the_epoch_alone() -> None:
    lengths = list(range(1, 200))
    one, two = (LengthBucketedBatches(lengths, 1000, seed=3) for _ in range(2))
    assert list(one) == list(one) == list(two)
    two.set_epoch(1)
    assert list(one) != list(two)
    with pytest.raises(ValueError, match="item 198 has 199 tokens, more than max_tokens=150"):
        LengthBucketedBatches(lengths, 150)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        LengthBucketedBatches(lengths, 1000, rank=2, world_size=2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fp8_keeps_the_error_it_reports(tmp_path: Path, dtype: str) -> None:
    samples = filled(tmp_path, stored_as="float8_e4m3", dtype=dtype)
    reader = tasks.store.open(tmp_path)
    means = []
    for sample in samples:
        read = reader.read(sample.key)
        computed = torch.from_numpy(sample.states)
        computed = computed.view(torch.bfloat16).float() if dtype == "bfloat16" else computed
        bits, scales = read.fp8
        assert bits.dtype == torch.float8_e4m3fn
        stored = bits.float() * scales[..., None]
        error = (stored - computed).norm(dim=-1) / computed.norm(dim=-1)
        assert float(error.max()) < 0.05
        group = zarr.open_group(tmp_path, mode="r")[sample_path(sample.key)]
        np.testing.assert_allclose(group["quantization_error"][:, 0], error.mean(dim=1), rtol=1e-4)
        np.testing.assert_allclose(group["quantization_error"][:, 1], error.amax(dim=1), rtol=1e-4)
        assert read.hidden_states.dtype == getattr(torch, dtype)
        torch.testing.assert_close(read.hidden_states.float(), stored, rtol=1e-2, atol=0)
        assert torch.equal(reader.read(sample.key, depths=[15]).hidden_states, read.hidden_states[[1]])
        means.append((len(sample.input_ids), error.mean(dim=1)))
    figures = stats(tmp_path)
    total = sum(n for n, _ in means)
    for row, error in enumerate(figures.quantization_error.values()):
        assert error == pytest.approx(sum(n * float(m[row]) for n, m in means) / total, rel=0.01)
    assert verify(tmp_path).ok


def test_fp8_of_zeros_and_of_massive_values(tmp_path: Path) -> None:
    one = identity(stored_as="float8_e4m3", dtype="float32")
    states = np.zeros((4, 3, 32), dtype="<f4")
    states[1, 1] = 1e-42
    states[2, 1, 5] = 3e38
    with Store.open(tmp_path, one) as store:
        fill(store, [Made(one.key([1, 2, 3]), np.arange(1, 4, dtype=np.int32), np.ones(3, dtype=bool), states)])
    read = tasks.store.open(tmp_path).read(0).hidden_states
    assert bool(torch.isfinite(read).all())
    assert not read[0].any()
    assert float(read[2, 1, 5]) == pytest.approx(3e38, rel=1e-3)


def test_an_exact_store_has_no_fp8(tmp_path: Path) -> None:
    filled(tmp_path)
    reader = tasks.store.open(tmp_path)
    with pytest.raises(ValueError, match="the store keeps its states exactly, in bfloat16"):
        _ = reader.read(0).fp8
    assert stats(tmp_path).quantization_error is None


def test_the_final_norm(tmp_path: Path) -> None:
    weight = np.linspace(0.1, 2, 32, dtype=np.float32)
    with Store.open(tmp_path, identity(), final_norm=FinalNorm(weight, 1e-5)):
        pass
    norm = tasks.store.open(tmp_path).final_norm
    assert norm is not None
    np.testing.assert_array_equal(norm.weight, weight)
    assert (norm.eps, norm.kind) == (1e-5, "rms")
    np.testing.assert_array_equal(zarr.open_group(tmp_path, mode="r")["final_norm_weight"][:], weight)


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "document", "directory", "other values"])
def test_a_damaged_final_norm_is_named_and_written_again_by_the_next_run(tmp_path: Path, damage: str) -> None:
    norm = FinalNorm(np.linspace(0.1, 2, 32, dtype=np.float32), 1e-5)
    with Store.open(tmp_path, identity(), final_norm=norm) as store:
        fill(store, [make(identity(), 5)])
    directory = tmp_path / "final_norm_weight"
    before = {path.name: path.read_bytes() for path in directory.iterdir()}
    if damage == "directory":
        shutil.rmtree(directory)
    elif damage == "remove":
        (directory / "c.0").unlink()
    elif damage == "document":
        (directory / "zarr.json").write_bytes(before["zarr.json"].replace(b"float32", b"float64"))
    elif damage == "other values":
        (directory / "c.0").write_bytes(seal(np.ones(32, dtype="<f4").tobytes()))
    else:
        (directory / "c.0").write_bytes(before["c.0"][:-1] if damage == "truncate" else b"\0" + before["c.0"][1:])
    reader = tasks.store.open(tmp_path)
    if damage != "other values":
        (problem,) = verify(tmp_path).other_problems
        assert reader.store_problems() == [problem]
        assert re.fullmatch(
            r"final_norm_weight/(c\.0|zarr\.json) (is missing|is not what was written); the next run that extracts "
            "into this store writes it again, from the checkpoint",
            problem,
        )
        if damage != "document":
            with pytest.raises(DamagedStore, match="the next run that extracts into this store"):
                _ = reader.final_norm
    with Store.open(tmp_path, identity()):  # has no checkpoint
        pass
    with Store.open(tmp_path, identity(), final_norm=norm):
        pass
    assert {path.name: path.read_bytes() for path in directory.iterdir()} == before
    assert verify(tmp_path).ok


def test_figures_of_a_store(tmp_path: Path) -> None:
    filled(tmp_path)
    figures = stats(tmp_path)
    files = [p for p in (tmp_path / "samples").glob("*/*/**/*") if p.is_file()]
    assert (figures.samples, figures.sources, figures.tokens) == (6, 6, sum(LENGTHS))
    assert figures.computed_bytes == sum(LENGTHS) * 4 * 32 * 2
    assert figures.stored_bytes == sum(p.stat().st_size for p in files)
    assert figures.lengths == {"min": 5, "median": 30, "p90": 513, "max": 600}
    assert figures.ratio == figures.computed_bytes / figures.stored_bytes
    Store.open(tmp_path / "empty", identity()).close()
    assert (stats(tmp_path / "empty").ratio, stats(tmp_path / "empty").lengths) == (0.0, {})


def test_preflight(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store.backend, "free_bytes", lambda: 10_000_000_000)
    found = preflight(store, num_tokens=50_000_000, num_samples=1000)
    assert found.bytes_per_million_tokens == pytest.approx(4 * 32 * 2 * 1e6 / 1.4 + 5e6, rel=1e-6)
    assert found.needed_bytes == pytest.approx(50 * found.bytes_per_million_tokens + 1000 * 32768, rel=1e-6)
    with pytest.raises(NoSpace, match=r"18\.8 GB needed \(187\.9 MB per 1M tokens\), 10\.0 GB free"):
        preflight(store, num_tokens=100_000_000, num_samples=1000)
    assert not preflight(store, num_tokens=100_000_000, num_samples=1000, force=True).fits


def test_preflight_of_an_object_store_looks_at_the_staging_disk(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.open(memory(), identity()) as store:
        monkeypatch.setattr(store.backend, "staging_free_bytes", lambda: 10_000_000)
        assert preflight(store, num_tokens=10**12, num_samples=1, chunk_tokens=50_000).fits
        with pytest.raises(NoSpace, match=r"18\.8 MB staged at a time, 10\.0 MB free for that"):
            preflight(store, num_tokens=10**12, num_samples=1, chunk_tokens=100_000)


def test_the_relay_answers_as_the_backend_does(s3: Callable[[], str]) -> None:
    url = s3()
    filled(url)
    with Store.open(url, identity()) as store:
        relay, backend = Relay(url), store.backend
        assert relay.names("samples") == backend.names("samples")
        assert json.loads(relay.read("zarr.json"))["node_type"] == "group"
        assert list(relay.read_all(["nothing", "zarr.json"] * 20)) == [None, backend.read("zarr.json")] * 20
        with pytest.raises(FileNotFoundError):
            relay.read("nothing")


def test_a_relay_whose_server_is_gone_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_REGION", "nowhere")
    relay = Relay("s3://key:secret@bucket")
    with pytest.raises(StorageFailure, match="set them in the environment"):
        relay.read("zarr.json")
    os.kill(relay._helper.pid, 9)
    relay._helper.wait()
    with pytest.raises(StorageFailure, match="ended with status -9"):
        relay.read("zarr.json")
