"""A manifest that is torn, altered or lost is said to be, never read as a smaller store; and what mends it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tasks.store
from tasks.store import DamagedStore, Share, SourceRecord, StorageFailure, Store
from tasks.store.backend import Backend, open_backend
from tasks.store.dataset import SampleDataset
from tasks.store.layout import PRIVATE
from tasks.store.maintenance import repair, stats, verify
from tasks.store.manifest import MANIFEST, NOTED, Manifest, ManifestWriter
from tests.store.samples import fill, identity, make, stage

SAMPLES = [make(identity(), n, seed=i) for i, n in enumerate((5, 600, 7, 9))]
PLANNED = [(s.key, len(s.input_ids)) for s in SAMPLES]
SOURCES = {f"s{i}-0" for i in range(len(SAMPLES))}


def filled(url: str) -> None:
    """A store with a segment for each sample, and the first one, without any."""
    with Store.open(url, identity()) as store:
        for i, sample in enumerate(SAMPLES):
            fill(store, [sample], prefix=f"s{i}")


def segment(backend: Backend, number: int) -> str:
    return f"{MANIFEST}/{backend.names(MANIFEST)[number]}"


def cut(backend: Backend, number: int, end: int | None) -> None:
    backend.put(segment(backend, number), backend.read(segment(backend, number))[:end])


def flip(backend: Backend, number: int) -> None:
    content = bytearray(backend.read(segment(backend, number)))
    content[len(content) // 2] ^= 1
    backend.put(segment(backend, number), bytes(content))


DAMAGES: dict[str, Callable[[Backend], object]] = {
    "the last torn": lambda backend: cut(backend, -1, 40),
    "one torn": lambda backend: cut(backend, 2, -2),
    "one empty": lambda backend: cut(backend, 2, 0),
    "one altered": lambda backend: flip(backend, 1),
    "one removed": lambda backend: backend.remove(segment(backend, 2)),
    "the first ones removed": lambda backend: [backend.remove(segment(backend, 0)) for _ in range(2)],
    "the note altered": lambda backend: backend.put(NOTED, b"[0000"),
    "all removed": lambda backend: backend.remove(MANIFEST),
    "the private directory removed": lambda backend: backend.remove(PRIVATE),
}


@pytest.fixture(params=list(DAMAGES))
def damaged(request: pytest.FixtureRequest, url: str) -> str:
    filled(url)
    with Store.open(url, identity()) as store:
        DAMAGES[request.param](store.backend)
    return url


def check_whole(url: str) -> None:
    reader = tasks.store.open(url)
    assert set(reader.keys) == {s.key for s in SAMPLES}
    assert set(reader.source_ids) >= SOURCES
    assert verify(url).ok


def test_reading_is_refused_until_it_is_repaired(damaged: str) -> None:
    for read in (tasks.store.open, stats, SampleDataset):
        with pytest.raises(DamagedStore, match="`layertap repair ") as refusal:
            read(damaged)
        assert damaged in str(refusal.value)
    found = verify(damaged)
    assert not found.ok
    assert found.samples == len(SAMPLES)
    assert len(found.store_problems) == 1
    assert repair(damaged).samples == len(SAMPLES)
    check_whole(damaged)


def test_a_rerun_brings_all_back(damaged: str) -> None:
    """Even one that was asked for few of them; sources that are not in the samples' records come with their rerun."""
    with Store.open(damaged, identity()) as store:
        assert store.rebuilt is not None
        assert store.rebuilt.samples == len(SAMPLES)
        assert store.missing(PLANNED[:1]) == []
    check_whole(damaged)
    with Store.open(damaged, identity()) as store:
        assert store.rebuilt is None


def test_setting_samples_aside_loses_no_other(damaged: str) -> None:
    open_backend(damaged).remove(f"samples/{SAMPLES[1].key[:2]}/{SAMPLES[1].key}/input_ids/c.0")
    assert verify(damaged, set_aside=True).set_aside == [SAMPLES[1].key]
    assert set(tasks.store.open(damaged).keys) == {s.key for s in SAMPLES} - {SAMPLES[1].key}


def test_samples_that_a_dead_run_had_not_listed_are_no_damage(url: str) -> None:
    with Store.open(url, identity()) as store:
        store.commit([stage(store, s, ("of a dead run",)) for s in SAMPLES[:2]])
    assert len(tasks.store.open(url)) == stats(url).samples == 0
    found = verify(url)
    assert (found.ok, set(found.unrecorded)) == (False, {s.key for s in SAMPLES[:2]})
    assert list(found.remedies("here")) == [
        "`layertap repair here` rebuilds the manifest and what lies between it and the samples"
    ]
    assert repair(url).added == 2
    assert len(tasks.store.open(url)) == 2
    assert verify(url).ok


def test_an_empty_store_that_lost_its_manifest_is_an_empty_store(url: str) -> None:
    Store.open(url, identity()).close()
    open_backend(url).remove(MANIFEST)
    assert len(tasks.store.open(url)) == 0
    filled(url)
    check_whole(url)


def test_a_store_from_before_there_was_a_first_segment_opens(url: str) -> None:
    filled(url)
    open_backend(url).remove(f"{MANIFEST}/00000000-created.jsonl")
    check_whole(url)
    with Store.open(url, identity()) as store:
        assert store.rebuilt is None


def test_a_share_may_write_beside_a_torn_line_and_not_to_a_lost_manifest(url: str) -> None:
    filled(url)
    share = Share("fleet", "share-0")
    with Store.open(url, identity()) as store:
        cut(store.backend, -1, 40)
    with Store.open(url, identity(), share=share) as store:
        assert store.missing(PLANNED) == []
        store.record(SourceRecord("again", s.key, s.loss_mask) for s in SAMPLES[-1:])
    with pytest.raises(DamagedStore, match="torn"):
        tasks.store.open(url)
    open_backend(url).remove(MANIFEST)
    with pytest.raises(DamagedStore, match="`layertap repair"):
        Store.open(url, identity(), share=share)
    assert repair(url).samples == len(SAMPLES)
    with Store.open(url, identity(), share=share):
        pass
    check_whole(url)


def test_a_merge_that_was_cut_off_leaves_a_whole_manifest(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(url)
    with Store.open(url, identity()) as store:
        removed: list[str] = []
        remove = store.backend.remove

        def die_at_the_third(path: str) -> None:
            removed.append(path)
            if len(removed) == 3:
                raise KeyboardInterrupt
            remove(path)

        monkeypatch.setattr(store.backend, "remove", die_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            store.forget([SAMPLES[0].key])
    assert len(open_backend(url).names(MANIFEST)) == len(SAMPLES)
    assert set(tasks.store.open(url).keys) == {s.key for s in SAMPLES[1:]}, "what was forgotten does not come back"


def test_a_listing_that_missed_a_segment_is_made_again(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system may show the second of two files that appear during a listing, and not the first."""
    filled(url)
    backend = open_backend(url)
    names, calls = backend.names, 0

    def miss_one(directory: str) -> list[str]:
        nonlocal calls
        calls += 1
        found = names(directory)
        return found[:2] + found[3:] if calls == 1 else found

    monkeypatch.setattr(backend, "names", miss_one)
    manifest = Manifest(backend)
    assert (manifest.problems, len(manifest.entries), calls) == ([], len(SAMPLES), 2)


def lose_the_last(url: str, count: int = 2) -> None:
    backend = open_backend(url)
    for _ in range(count):
        backend.remove(segment(backend, -1))


@pytest.mark.parametrize("count", [1, 2, len(SAMPLES)])
def test_the_loss_of_the_last_segments_is_seen(url: str, count: int) -> None:
    filled(url)
    lose_the_last(url, count)
    with pytest.raises(DamagedStore, match=r"segments that a finished run wrote are missing: 0.*`layertap repair "):
        tasks.store.open(url)
    assert repair(url).added == count
    check_whole(url)


def test_a_share_neither_takes_the_place_of_a_lost_segment_nor_notes_what_is_left(url: str) -> None:
    def opened() -> Store:
        return Store.open(url, identity(), share=Share("fleet", "share-0"))

    with opened() as store:
        for i, sample in enumerate(SAMPLES):
            fill(store, [sample], prefix=f"s{i}")
    lose_the_last(url, 1)
    with opened() as store:
        store.record([SourceRecord("new", SAMPLES[0].key, SAMPLES[0].loss_mask)])
    with pytest.raises(DamagedStore, match="are missing"):
        tasks.store.open(url)
    with Store.open(url, identity()) as store:
        assert store.rebuilt is not None
    check_whole(url)


def test_what_one_share_wrote_last_is_noted_by_another_too(url: str) -> None:
    shares = [Store.open(url, identity(), share=Share("fleet", f"share-{i}")) for i in range(2)]
    fill(shares[0], SAMPLES[:2])
    fill(shares[1], SAMPLES[2:])
    shares[0].close()
    shares[1]._lease.release()  # it dies before its end
    name = next(name for name in open_backend(url).names(MANIFEST) if "share-1" in name)
    open_backend(url).remove(f"{MANIFEST}/{name}")
    with pytest.raises(DamagedStore, match=f"are missing: {name}"):
        tasks.store.open(url)


def test_a_merge_after_the_note_and_a_store_without_a_note_are_no_damage(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(url)
    with monkeypatch.context() as patch:
        patch.setattr(ManifestWriter, "note", lambda self: None)  # the run that merges dies before it notes anything
        with Store.open(url, identity()) as store:
            store.manifest.rewrite()
    check_whole(url)
    open_backend(url).remove(NOTED)
    check_whole(url)
    lose_the_last(url, 1)
    with pytest.raises(DamagedStore, match="there are samples, but no manifest"):
        tasks.store.open(url)


def test_a_note_that_cannot_be_made_fails_no_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise StorageFailure("the disk is full")

    store = Store.open(tmp_path, identity())
    fill(store, SAMPLES)
    monkeypatch.setattr(store.backend, "put", full)
    store.close()
    assert len(tasks.store.open(tmp_path)) == len(SAMPLES)
    with Store.open(tmp_path, identity()):
        pass
    assert verify(tmp_path).ok
