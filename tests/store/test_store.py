"""Stage, commit, record, and what a rerun finds missing."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

import tasks.store
from tasks.store import (
    DamagedSample,
    FinalNorm,
    IdentityMismatch,
    NotAStore,
    SampleNotFound,
    SourceRecord,
    StagedSample,
    StorageFailure,
    Store,
    StoreBusy,
    StoreError,
)
from tasks.store.layout import sample_path
from tasks.store.stage import stage_states, write_file
from tests.store.samples import Made, fill, identity, make, stage


def directory(store: Store, sample: Made) -> Path:
    return Path(store.url) / sample_path(sample.key)


def planned(samples: list[Made]) -> list[tuple[str, int]]:
    return [(s.key, len(s.input_ids)) for s in samples]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_tokens", [1, 17, 512, 513, 1536])
def test_a_sample_comes_back_bit_for_bit(tmp_path: Path, dtype: str, num_tokens: int) -> None:
    with Store.open(tmp_path, identity(dtype=dtype)) as store:
        sample = make(store.identity, num_tokens)
        fill(store, [sample])
    read = tasks.store.open(tmp_path).read("chat-0")
    assert read.hidden_states.shape == (4, num_tokens, 32)
    assert str(read.hidden_states.dtype) == f"torch.{dtype}"
    np.testing.assert_array_equal(read.states_LTH, sample.states)
    assert read.hidden_states.data_ptr() == read.states_LTH.ctypes.data
    np.testing.assert_array_equal(read.input_ids.numpy(), sample.input_ids)
    np.testing.assert_array_equal(read.loss_mask.numpy(), sample.loss_mask)
    assert (read.key, read.source_id, read.depths, read.next_token) == (sample.key, "chat-0", (3, 15, 28, 30), 7)


def test_a_subset_of_depths(store: Store) -> None:
    sample = make(store.identity, 600)
    fill(store, [sample])
    reader = tasks.store.open(store.url)
    read = reader.read(0, depths=(15, 30))
    assert read.depths == (15, 30)
    np.testing.assert_array_equal(read.states_LTH, sample.states[[1, 3]])
    with pytest.raises(ValueError, match=r"choose from \[3, 15, 28, 30\]"):
        reader.read(0, depths=(4,))


def test_only_what_is_committed_counts(store: Store) -> None:
    samples = [make(store.identity, n) for n in (5, 6, 7)]
    assert store.missing(planned(samples)) == [s.key for s in samples]
    staged = [stage(store, s) for s in samples]
    assert store.missing(planned(samples)) == [s.key for s in samples]
    assert store.commit(staged[:2]) == [s.key for s in samples[:2]]
    assert store.missing(planned(samples)) == [samples[2].key]
    store.record()
    assert store.missing(planned(samples)) == [samples[2].key]
    assert tasks.store.open(store.url).keys == [s.key for s in samples[:2]]


def test_a_run_that_died_before_the_manifest_loses_nothing(tmp_path: Path) -> None:
    samples = [make(identity(), n) for n in (5, 6)]
    with Store.open(tmp_path, identity()) as store:
        store.commit([stage(store, s) for s in samples])
    with Store.open(tmp_path, identity()) as store:
        assert store.missing(planned(samples)) == []
        store.record(SourceRecord(f"s{i}", s.key, s.loss_mask) for i, s in enumerate(samples))
    assert tasks.store.open(tmp_path).source_ids == ["s0", "s1"]


def test_every_missing_or_short_file_makes_exactly_that_sample_missing(store: Store) -> None:
    samples = [make(store.identity, n) for n in (5, 600, 7)]
    fill(store, samples)
    victim = samples[1]
    for path in store.spec.files(600):
        file = directory(store, victim) / path
        content = file.read_bytes()
        file.write_bytes(content[:-1])
        assert store.missing(planned(samples)) == [victim.key]
        file.unlink()
        assert store.missing(planned(samples)) == [victim.key]
        file.write_bytes(content)
        assert store.missing(planned(samples)) == []
    shutil.rmtree(directory(store, victim))
    assert store.missing(planned(samples)) == [victim.key]


@pytest.mark.parametrize("damage", ["truncate", "unlink", "record"])
def test_a_damaged_sample_is_set_aside_and_extracted_again(store: Store, damage: str) -> None:
    sample = make(store.identity, 600)
    fill(store, [sample])
    chunk = directory(store, sample) / "hidden_states/c.0.1.0"
    if damage == "truncate":
        chunk.write_bytes(chunk.read_bytes()[:100])
    elif damage == "unlink":
        chunk.unlink()
    else:
        (directory(store, sample) / "zarr.json").unlink()
    with pytest.raises(DamagedSample, match=r"c\.0\.1\.0|zarr.json is missing"):
        tasks.store.open(store.url).read(0)
    assert store.commit([stage(store, sample)]) == [sample.key]
    store.record()
    np.testing.assert_array_equal(tasks.store.open(store.url).read(0).states_LTH, sample.states)
    assert len(list((Path(store.url) / ".layertap/damaged").iterdir())) == 1


def test_a_committed_sample_is_never_overwritten(store: Store) -> None:
    sample = make(store.identity, 5)
    fill(store, [sample])
    before = {p: p.stat().st_ino for p in directory(store, sample).rglob("*")}
    other = Made(sample.key, sample.input_ids, sample.loss_mask, sample.states + np.uint16(1))
    assert store.commit([stage(store, other)]) == []
    assert {p: p.stat().st_ino for p in directory(store, sample).rglob("*")} == before
    np.testing.assert_array_equal(tasks.store.open(store.url).read(0).states_LTH, sample.states)


def test_staged_files_that_differ_from_the_receipt_are_refused(store: Store) -> None:
    sample = make(store.identity, 600)
    staged = stage(store, sample)
    file = store.staging() / sample.key / "hidden_states/c.0.1.0"
    content = file.read_bytes()
    file.write_bytes(content[:-5])
    with pytest.raises(StoreError, match=r"c\.0\.1\.0 has \d+ bytes instead of"):
        store.commit([staged])
    file.unlink()
    with pytest.raises(StoreError, match=r"c\.0\.1\.0 is missing"):
        store.commit([staged])
    objects = dict(staged.objects)
    del objects["input_ids/c.0"]
    with pytest.raises(StoreError, match="the staged files are"):
        store.commit([StagedSample(sample.key, 600, objects, sample.loss_mask)])
    assert store.missing(planned([sample])) == [sample.key]


def test_staging_refuses_states_of_another_shape_or_type(store: Store) -> None:
    sample = make(store.identity, 12)
    with pytest.raises(ValueError, match=r"shape \(4, 12, 32\), the store needs \(4, 11, 32\)"):
        stage_states(store.staging(), sample.key, store.spec, sample.states, sample.input_ids[:-1])
    with pytest.raises(ValueError, match="states are float32, the store takes bfloat16"):
        stage_states(store.staging(), sample.key, store.spec, sample.states.astype("f4"), sample.input_ids)
    with pytest.raises(ValueError, match="no sample key"):
        stage_states(store.staging(), "../up", store.spec, sample.states, sample.input_ids)
    assert [p.name for p in store.staging().iterdir()] == ["owner.json"]


def test_the_specification_travels_as_a_dictionary(store: Store) -> None:
    sample = make(store.identity, 12)
    once = stage_states(store.staging(), sample.key, store.spec.to_dict(), sample.states, sample.input_ids)
    assert once == stage_states(store.staging(), sample.key, store.spec, sample.states, sample.input_ids)


def test_sources_that_share_a_sample_keep_their_own_masks(store: Store) -> None:
    sample = make(store.identity, 20)
    other, third = ~sample.loss_mask, np.zeros(20, dtype=bool)
    store.commit([stage(store, sample, ("a", "b"))])
    store.record(
        [
            SourceRecord("a", sample.key, sample.loss_mask),
            SourceRecord("b", sample.key, other),
            SourceRecord("c", sample.key, third),
        ]
    )
    reader = tasks.store.open(store.url)
    assert len(reader) == 1
    assert reader.sources_of(sample.key) == ("a", "b", "c")
    for source_id, mask in (("a", sample.loss_mask), ("b", other), ("c", third), (sample.key, sample.loss_mask)):
        np.testing.assert_array_equal(reader.read(source_id).loss_mask_T, mask)
    store.record([SourceRecord("a", sample.key, third), SourceRecord("b", sample.key, sample.loss_mask)])
    reader.refresh()
    np.testing.assert_array_equal(reader.read("a").loss_mask_T, third)
    np.testing.assert_array_equal(reader.read("b").loss_mask_T, sample.loss_mask)


def test_recording_the_same_sources_again_writes_nothing(store: Store) -> None:
    sample = make(store.identity, 5)
    fill(store, [sample])
    segments = Path(store.url) / ".layertap/manifest"
    before = sorted(p.name for p in segments.iterdir())
    store.record([SourceRecord("chat-0", sample.key, sample.loss_mask)])
    assert sorted(p.name for p in segments.iterdir()) == before
    with pytest.raises(KeyError):
        store.record([SourceRecord("x", "0" * 64, sample.loss_mask)])


def test_a_source_id_may_be_any_text(store: Store) -> None:
    sample = make(store.identity, 5)
    store.commit([stage(store, sample, ("../x\n", "é\u2028"))])
    store.record([SourceRecord("../x\n", sample.key, sample.loss_mask), SourceRecord("é\u2028", sample.key, [1] * 5)])
    assert tasks.store.open(store.url).source_ids == ["../x\n", "é\u2028"]


def test_another_identity_is_refused_with_both_sides(tmp_path: Path) -> None:
    Store.open(tmp_path, identity()).close()
    with pytest.raises(IdentityMismatch) as refusal:
        Store.open(tmp_path, identity(depths=(3, 15, 28), layer_ids=(2, 14, 27), dtype="float32"))
    assert "depths: the store has (3, 15, 28, 30), this run (3, 15, 28)" in str(refusal.value)
    assert "dtype: the store has 'bfloat16', this run 'float32'" in str(refusal.value)
    same_depths = identity(convention="input", layer_ids=(3, 15, 28, 30))
    Store.open(tmp_path, same_depths).close()


def test_something_else_at_the_place_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotAStore, match="there is no store"):
        tasks.store.open(tmp_path)
    (tmp_path / "zarr.json").write_text('{"attributes": {}, "zarr_format": 3, "node_type": "group"}')
    for opener in (tasks.store.open, lambda p: Store.open(p, identity())):
        with pytest.raises(NotAStore, match="not a layertap store"):
            opener(tmp_path)


def test_a_directory_of_something_else_stays_as_it_is(tmp_path: Path) -> None:
    for number, names in enumerate((["notes.txt"], ["samples"], [".layertap", "samples", "notes.txt"])):
        place = tmp_path / str(number)
        for name in names:
            (place / name).mkdir(parents=True)
        with pytest.raises(NotAStore, match="is not empty, and no store: name a new or an empty directory"):
            Store.open(place, identity())
        assert sorted(path.name for path in place.iterdir()) == sorted(names)
    (tmp_path / "empty").mkdir()
    Store.open(tmp_path / "empty", identity()).close()


def test_a_store_that_was_interrupted_in_its_creation_opens(tmp_path: Path) -> None:
    sample = make(identity(), 5)
    with Store.open(tmp_path, identity(), final_norm=FinalNorm(np.ones(32, np.float32), 1e-5)):
        pass
    (tmp_path / "zarr.json").unlink()  # written after the copy of it, and before the manifest
    shutil.rmtree(tmp_path / ".layertap/manifest")
    with pytest.raises(NotAStore, match="there is no store"):
        tasks.store.open(tmp_path)
    with Store.open(tmp_path, identity()) as store:
        fill(store, [sample])
    assert tasks.store.open(tmp_path).keys == [sample.key]


@pytest.mark.parametrize("below", ["", "below"])
def test_a_file_in_the_place_of_a_store_is_named(tmp_path: Path, below: str) -> None:
    place = tmp_path / "file" / below
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotAStore, match="is a file or below one; a store is a directory: name that"):
        tasks.store.open(place)
    with pytest.raises(StorageFailure, match="is a file or below one; a store is a directory: name a new or an empty"):
        Store.open(place, identity())
    assert (tmp_path / "file").read_text() == "mine"


def test_a_place_that_cannot_be_made_is_named() -> None:
    with pytest.raises(StorageFailure, match=r"no directory can be made at /proc/store: .*; choose another place"):
        Store.open("/proc/store", identity())
    for opener in (tasks.store.open, lambda p: Store.open(p, identity())):
        with pytest.raises(StorageFailure, match=r"cannot read .*: File name too long"):
            opener("x" * 300)


def test_one_run_writes_at_a_time(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity(), run="first"):
        with pytest.raises(StoreBusy, match="being written by run first"):
            Store.open(tmp_path, identity(), run="second")
        tasks.store.open(tmp_path)
    Store.open(tmp_path, identity(), run="second").close()


def test_staging_of_dead_runs_is_collected_and_that_of_live_ones_kept(tmp_path: Path) -> None:
    script = (
        "import os, sys; from tasks.store import Store; from tests.store.samples import *;"
        "s = Store.open(sys.argv[1], identity(), run='dead'); stage(s, make(s.identity, 9)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path], check=False).returncode == 9
    staging = tmp_path / ".layertap/staging"
    assert len(list(staging.iterdir())) == 1
    with Store.open(tmp_path, identity(), run="next") as store:
        assert store.collected == 1
        assert list(staging.iterdir()) == []
        live = store.staging()
        assert store.backend.collect_staging() == 0
        assert live.is_dir()
    assert list(staging.iterdir()) == []


def test_a_quarantined_sample_is_listed_until_it_is_committed(store: Store) -> None:
    sample = make(store.identity, 5)
    staged = stage(store, sample)
    store.quarantine(sample.key, ["chat-0"], "nonfinite", "3 NaN at depth 15", evidence={"nonfinite": [0, 3, 0, 0]})
    assert store.missing(planned([sample])) == [sample.key]
    assert not (store.staging() / sample.key).exists()
    reader = tasks.store.open(store.url)
    (refused,) = reader.quarantined()
    assert (refused["key"], refused["sources"], refused["reason"]) == (sample.key, ["chat-0"], "nonfinite")
    assert refused["evidence"] == {"nonfinite": [0, 3, 0, 0]}
    staged = stage(store, sample)
    store.commit([staged])
    assert list(reader.quarantined()) == []


def test_provenance_holds_no_secrets(store: Store) -> None:
    store.write_provenance(
        {
            "engine": {"tensor_parallel_size": 8, "hf_token": "hf_abc", "max_num_batched_tokens": 8192},
            "env": ["http://user:pw@proxy:80"],
            "AWS_SECRET_ACCESS_KEY": "x",
        }
    )
    (run,) = tasks.store.open(store.url).runs()
    assert run["engine"] == {"tensor_parallel_size": 8, "hf_token": "(removed)", "max_num_batched_tokens": 8192}
    assert run["env"] == ["http://proxy:80"]
    assert run["AWS_SECRET_ACCESS_KEY"] == "(removed)"
    assert run["run"] == "first"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_disk_that_refuses_is_named_and_loses_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    samples = [make(store.identity, n) for n in (5, 6)]
    fill(store, samples[:1])
    write, calls = os.writev, 0

    def refuse(descriptor: int, parts: list[bytes]) -> int:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise OSError(code, os.strerror(code))
        return write(descriptor, parts)

    with monkeypatch.context() as patch:
        patch.setattr("tasks.store.stage.os.writev", refuse)
        with pytest.raises(StorageFailure, match=r"cannot write .*: (the disk|permission|the file system)"):
            stage(store, samples[1])
    assert store.missing(planned(samples)) == [samples[1].key]
    assert store.commit([stage(store, samples[1])]) == [samples[1].key]


def test_a_write_that_ends_early_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for most in (1, 3, 100):
        monkeypatch.setattr(os, "writev", lambda to, parts, most=most: os.write(to, b"".join(parts)[:most]))
        size, crc = write_file(str(tmp_path / "file"), b"", b"abcdefgh", b"", b"ij")
        assert (tmp_path / "file").read_bytes() == b"abcdefghij"
        assert (size, crc) == (10, google_crc32c.value(b"abcdefghij"))


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_store_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    sample = make(identity(), 5)
    with Store.open(tmp_path, identity()) as store:
        fill(store, [sample])
    opened = os.open

    def refuse(path: str | Path, flags: int, *args: int) -> int:
        if flags & os.O_RDWR:
            raise OSError(code, os.strerror(code), str(path))
        return opened(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageFailure, match=r"cannot write .*writer\.json: (the file system is read-only|permission)"):
        Store.open(tmp_path, identity())
    assert len(tasks.store.open(tmp_path)) == 1


def test_a_sample_that_is_not_there(store: Store) -> None:
    fill(store, [make(store.identity, 5)])
    reader = tasks.store.open(store.url)
    with pytest.raises(SampleNotFound, match="no sample with source id or key 'nobody'"):
        reader.read("nobody")
    with pytest.raises(SampleNotFound, match="has no sample 0000"):
        reader.read("0" * 64)
    with pytest.raises(IndexError):
        reader.read(1)


def test_the_listing(store: Store) -> None:
    fill(store, [make(store.identity, n) for n in (5, 600)])
    first, second = tasks.store.open(store.url).listing()
    assert (first.shape, first.depths, first.sources) == ((4, 5, 32), (3, 15, 28, 30), ("chat-0",))
    files = [p for p in (Path(store.url) / sample_path(second.key)).rglob("*") if p.is_file()]
    assert second.nbytes == sum(p.stat().st_size for p in files)


def test_a_commit_that_failed_half_way_can_be_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Store.open(tmp_path, identity(), run="first") as store:
        samples = [make(store.identity, n) for n in (5, 6, 7)]
        staged = [stage(store, sample) for sample in samples]
        rename, allowed = Path.rename, 1

        def fail_after_the_first(path: Path, target: Path) -> Path:
            nonlocal allowed
            if path.name in {sample.key for sample in samples}:
                if not allowed:
                    raise OSError(errno.EIO, "Input/output error")
                allowed -= 1
            return rename(path, target)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", fail_after_the_first)
            with pytest.raises(StorageFailure, match="input/output error"):
                store.commit(staged)
        assert len(store.missing(planned(samples))) == 2
        assert sorted(store.commit(staged)) == sorted(s.key for s in samples[1:])
        assert store.missing(planned(samples)) == []
        store.record()
    assert len(tasks.store.open(tmp_path)) == 3


def test_a_closed_store_takes_nothing_more(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity(), run="first") as store:
        staged = stage(store, make(store.identity, 5))
    with pytest.raises(StoreError, match="was closed"):
        store.commit([staged])
    with pytest.raises(StoreError, match="was closed"):
        store.staging()
    assert not list((tmp_path / "samples").glob("??/*"))
