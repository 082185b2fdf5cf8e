"""What holds for every place a store can be kept in: local directory, object store in memory, real S3 server."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import tasks.store
from tasks.store import DamagedSample, StorageFailure, Store, StoreBusy, StoreError, object_store
from tasks.store.backend import Backend, Publication
from tasks.store.layout import RECORD, sample_path
from tasks.store.maintenance import gc, repair, verify
from tasks.store.manifest import MANIFEST
from tests.store.samples import Made, fill, identity, make, stage


def planned(samples: list[Made]) -> list[tuple[str, int]]:
    return [(s.key, len(s.input_ids)) for s in samples]


def some(*lengths: int) -> list[Made]:
    return [make(identity(), n, seed=i) for i, n in enumerate(lengths)]


def test_a_run_and_a_rerun(url: str) -> None:
    samples = some(5, 600, 7)
    with Store.open(url, identity(), run="first") as store:
        assert store.missing(planned(samples)) == [s.key for s in samples]
        fill(store, samples)
        assert store.missing(planned(samples)) == []
        assert [path.name for path in store.staging().iterdir()] == ["owner.json"]
        with pytest.raises(StoreBusy, match="being written by run first"):
            Store.open(url, identity(), run="second")
    with Store.open(url, identity(), run="second") as store:
        assert store.missing(planned(samples)) == []
    reader = tasks.store.open(url)
    for sample, read in zip(samples, reader, strict=True):
        np.testing.assert_array_equal(read.states_LTH, sample.states)
        np.testing.assert_array_equal(read.input_ids_T, sample.input_ids)
        np.testing.assert_array_equal(read.loss_mask_T, sample.loss_mask)
    found = verify(url)
    assert (found.ok, found.samples, found.unrecorded, found.leftovers) == (True, 3, [], [])


@pytest.mark.parametrize("damage", ["short", "gone", "no record"])
def test_a_damaged_sample_is_extracted_again(url: str, damage: str) -> None:
    samples = some(5, 600, 7)
    with Store.open(url, identity()) as store:
        fill(store, samples)
        directory = sample_path(samples[1].key)
        if damage == "short":
            store.backend.put(f"{directory}/loss_mask/c.0", b"abc")
        else:
            store.backend.remove(f"{directory}/{RECORD if damage == 'no record' else 'hidden_states/c.0.1.0'}")
        with pytest.raises(DamagedSample):
            tasks.store.open(url).read(samples[1].key)
        assert list(verify(url).damaged) == [samples[1].key]
        assert store.missing(planned(samples)) == [samples[1].key]
        assert store.commit([stage(store, samples[1])]) == [samples[1].key]
        store.record()
        assert store.missing(planned(samples)) == []
    np.testing.assert_array_equal(tasks.store.open(url).read(samples[1].key).states_LTH, samples[1].states)
    assert verify(url).ok


def test_a_committed_sample_stays(url: str) -> None:
    (sample,) = some(5)
    other = Made(sample.key, sample.input_ids, sample.loss_mask, sample.states ^ np.uint16(1))
    with Store.open(url, identity()) as store:
        fill(store, [sample])
        assert store.commit([stage(store, other)]) == []
        assert [path.name for path in store.staging().iterdir()] == ["owner.json"]
    assert verify(url).ok
    np.testing.assert_array_equal(tasks.store.open(url).read(0).states_LTH, sample.states)


def test_the_second_of_two_records_for_one_key_does_not_replace_the_first(url: str, tmp_path: Path) -> None:
    """The last line of defence, should two runs ever get past the lease."""
    (sample,) = some(5)
    with Store.open(url, identity()) as store:
        fill(store, [sample])
        stage(store, sample)
        before = store.backend.read(f"{sample_path(sample.key)}/{RECORD}")
        (late,) = store.backend.publish([Publication(store.staging() / sample.key, sample.key, {}, b"{}")])
        assert not late
        assert store.backend.read(f"{sample_path(sample.key)}/{RECORD}") == before


def test_a_run_that_was_killed_lets_the_next_one_in(url: str, request: pytest.FixtureRequest) -> None:
    if url.startswith("memory:"):
        url = request.getfixturevalue("s3")()  # another process cannot see this one's memory
    script = (
        "import os, sys; from tasks.store import Store; from tests.store.samples import *;"
        "s = Store.open(sys.argv[1], identity(), run='dead'); stage(s, make(s.identity, 9)); os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", script, url], check=False).returncode == 9
    with Store.open(url, identity(), run="next") as store:
        assert store.collected == 1


def test_many_runs_leave_few_segments(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.store.manifest._SEGMENTS_BEFORE_MERGE", 5)
    samples = some(*range(1, 8))
    with Store.open(url, identity()) as store:
        for i, sample in enumerate(samples):
            fill(store, [sample], prefix=f"s{i}")
        assert len(store.backend.names(MANIFEST)) == 1 + 7
    with Store.open(url, identity()) as store:
        assert len(store.backend.names(MANIFEST)) == 1
        assert store.missing(planned(samples)) == []
    reader = tasks.store.open(url)
    assert reader.keys == [s.key for s in samples]
    assert reader.source_ids == [f"s{i}-0" for i in range(7)]


def test_a_torn_manifest_line_costs_nothing_but_a_rerun(url: str) -> None:
    samples = some(5, 6)
    with Store.open(url, identity()) as store:
        for i, sample in enumerate(samples):
            fill(store, [sample], prefix=f"s{i}")
        name = store.backend.names(MANIFEST)[-1]
        line = store.backend.read(f"{MANIFEST}/{name}")
        store.backend.put(f"{MANIFEST}/{name}", line[: len(line) // 2])
    found = verify(url)
    assert found.unrecorded == [samples[1].key]
    assert found.store_problems == [f"a line of manifest segment {name} is torn or altered"]
    with Store.open(url, identity()) as store:
        assert store.missing(planned(samples)) == []
    assert verify(url).ok
    assert tasks.store.open(url).source_ids == ["s0-0", "s1-0"]


def test_repair_rebuilds_everything_from_the_samples(url: str) -> None:
    samples = some(5, 600, 7)
    shared = samples[0]
    with Store.open(url, identity()) as store:
        fill(store, samples[1:])
        staged = stage(store, shared)
        own = ~shared.loss_mask
        object.__setattr__(staged, "sources", {"a": shared.loss_mask, "b": own})
        store.commit([staged])
        backend = store.backend
        backend.remove(MANIFEST)
        backend.remove(f"samples/{RECORD}")
        backend.put(f"samples/{shared.key[:2]}/{RECORD}", b"{}")
        backend.remove(f"{sample_path(samples[2].key)}/input_ids/c.0")
    done = repair(url)
    assert (done.samples, done.added, done.dropped, done.groups) == (2, 2, 0, 2)
    assert done.damaged == {samples[2].key: "input_ids/c.0 is missing"}
    reader = tasks.store.open(url)
    assert set(reader.source_ids) == {"chat-0", "a", "b"}
    np.testing.assert_array_equal(reader.read("b").loss_mask_T, own)
    np.testing.assert_array_equal(reader.read("a").loss_mask_T, shared.loss_mask)


def test_gc_removes_what_no_reader_looks_at(url: str) -> None:
    samples = some(5, 600, 7)
    with Store.open(url, identity()) as store:
        fill(store, samples)
        half = samples[0].key[:2] + "0" * 62
        store.backend.put(f"{sample_path(half)}/hidden_states/c.0.0.0", b"half an upload")
        store.backend.put(f"{sample_path(samples[1].key)}/loss_mask/c.0", b"short")
    assert verify(url).leftovers == [half]
    assert verify(url, set_aside=True).set_aside == [samples[1].key]
    done = gc(url)
    assert done.leftovers == 1
    assert done.nbytes >= len(b"half an upload")
    found = verify(url)
    assert (found.samples, found.ok, found.leftovers) == (2, True, [])
    with Store.open(url, identity()) as store:
        assert store.missing(planned(samples)) == [samples[1].key]


def test_verify_continues_where_it_was_interrupted(url: str, tmp_path: Path) -> None:
    samples = some(5, 6, 7, 8)
    with Store.open(url, identity()) as store:
        fill(store, samples)
    notes = tmp_path / "notes"

    def stop(done: int, total: int, nbytes: int) -> None:
        assert total == 4
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        verify(url, workers=1, resume=notes, progress=stop)
    assert len(notes.read_text().split()) == 2
    steps: list[int] = []
    assert verify(url, workers=1, resume=notes, progress=lambda done, *_: steps.append(done)).ok
    assert steps == [3, 4]
    assert not notes.exists()


def test_an_upload_that_fails_leaves_nothing_visible(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, samples = memory(), some(5, 600, 7)
    with Store.open(url, identity()) as store:
        put, calls = store.backend.put, 0

        def refuse(path: str, data: bytes) -> None:
            nonlocal calls
            calls += 1
            if calls == 12:
                raise StorageFailure("out of reach")
            put(path, data)

        staged = [stage(store, s) for s in samples]
        with monkeypatch.context() as patch:
            patch.setattr(store.backend, "put", refuse)
            with pytest.raises(StorageFailure):
                store.commit(staged)
        assert store.missing(planned(samples)) == [s.key for s in samples]
        assert len(verify(url).leftovers) > 0
        assert store.commit(staged) == [s.key for s in samples]
        store.record()
    assert verify(url).ok


def test_a_record_whose_acknowledgement_was_lost_counts(memory: Callable[[], str]) -> None:
    backend = object_store.ObjectBackend(memory())
    assert backend.create("a", b"mine")
    assert backend.create("a", b"mine")
    assert not backend.create("a", b"other")


def test_a_staged_file_altered_on_disk_is_not_uploaded(memory: Callable[[], str]) -> None:
    (sample,) = some(5)
    with Store.open(memory(), identity()) as store:
        staged = stage(store, sample)
        file = store.staging() / sample.key / "hidden_states/c.0.0.0"
        content = bytearray(file.read_bytes())
        content[100] ^= 1
        file.write_bytes(content)
        with pytest.raises(StorageFailure, match="was altered after it was written"):
            store.commit([staged])
        assert store.missing(planned([sample])) == [sample.key]


def test_a_holder_that_lost_the_lease_stops(memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    url, (sample,) = memory(), some(5)
    with Store.open(url, identity(), run="slow") as slow:
        staged = stage(slow, sample)
        monkeypatch.setattr(object_store, "_STALE_S", -1.0)
        with Store.open(url, identity(), run="quick"):
            with pytest.raises(StoreBusy, match="another run has taken over"):
                slow.commit([staged])
            with pytest.raises(StoreBusy, match="another run has taken over"):
                slow.record()
    with Store.open(url, identity(), run="later"):
        pass


def test_a_lease_of_another_host_is_respected_while_it_beats(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = memory()
    monkeypatch.setattr(object_store, "owner", lambda run, share: {"run": run, "host": "elsewhere", "pid": 2**22 + 1})
    held = Store.open(url, identity(), run="there")
    monkeypatch.setattr(object_store, "owner", lambda run, share: {"run": run, "host": "here", "pid": 1})
    with pytest.raises(StoreBusy, match="run there \\(host elsewhere"):
        Store.open(url, identity(), run="here")
    held.close()
    Store.open(url, identity(), run="here").close()


def test_credentials_in_the_url_are_refused() -> None:
    with pytest.raises(StoreError, match="set them in the environment"):
        object_store.connect("s3://key:secret@bucket/prefix")


@pytest.mark.parametrize("url", ["ftp://x/y", "http://x/y", "s3:///x"])
def test_a_url_that_no_store_can_have_is_named_in_one_line(url: str) -> None:
    for opener in (tasks.store.open, lambda u: Store.open(u, identity())):
        with pytest.raises(StoreError, match="^" + url) as refusal:
            opener(url)
        assert "\n" not in str(refusal.value)
        assert ("s3://, " in str(refusal.value)) == (not url.startswith("s3:"))


def test_an_unreachable_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RETRIES", {"max_retries": 0})
    for name, value in {
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "x",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageFailure, match="s3://bucket/prefix refused or could not be reached"):
        tasks.store.open("s3://bucket/prefix")


def test_waiting_for_the_other_run(url: str) -> None:
    with Store.open(url, identity(), run="first"), pytest.raises(StoreBusy):
        Store.open(url, identity(), run="second", wait_s=0.05)


def test_files_of_a_backend(url: str) -> None:
    with Store.open(url, identity()) as store:
        backend: Backend = store.backend
        assert [data is None for data in backend.read_all(["nothing", RECORD])] == [True, False]
        with pytest.raises(FileNotFoundError):
            backend.read("nothing")
        assert backend.names("nothing") == []
        assert backend.sizes("nothing") == {}
        backend.remove("nothing")
        backend.put("a/b/c", b"12")
        backend.put("a/d", b"1")
        assert backend.names("a") == ["b", "d"]
        assert backend.sizes("a") == {"b/c": 2, "d": 1}
        backend.remove("a")
        assert backend.sizes("a") == {}
        large = bytes(range(256)) * (12 << 12)  # in several parts, on an object store
        backend.put("a/large", large)
        assert backend.read("a/large") == large


def test_very_many_samples_in_an_object_store_are_looked_up_by_name(
    memory: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = some(*range(1, 9))
    monkeypatch.setattr(object_store, "_IN_FULL", 7)
    with Store.open(memory(), identity()) as store:
        fill(store, samples)
        store.backend.remove(sample_path(samples[3].key))
        store.backend.remove(f"{sample_path(samples[5].key)}/input_ids/c.0")
        assert store.missing(planned(samples)) == [samples[3].key]
        assert store.missing(planned(samples[5:])) == [samples[5].key]
