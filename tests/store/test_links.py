"""Equal chunks are links to one file; no reader notices, and no loss of a link is more than a loss of space."""

import errno
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr

from tasks.store import SourceRecord, StagedSample, Store
from tasks.store import open as open_store
from tasks.store.links import content_name, links_in
from tasks.store.maintenance import gc, stats, verify
from tasks.store.stage import stage_states
from tasks.vocabulary import ChunkGone, SharedChunk, Sharing
from tests.store.samples import Made, identity

IDENTITY = identity(hidden_size=256)
C = 512
"""Tokens of a chunk with that hidden size."""


@pytest.fixture(autouse=True)
def _fresh_process() -> None:
    """What another process would know of the links: nothing."""
    links_in.cache_clear()


def family(count: int = 3, shared: int = 2 * C + 100, seed: int = 0, of: Any = IDENTITY) -> list[Made]:
    """Samples with the same first rows and tokens, and some of their own behind."""
    random = np.random.default_rng(seed)
    dtype = "<f4" if of.dtype == "float32" else "<u2"

    def states(tokens: int) -> Any:
        values = random.standard_t(3, (len(of.depths), tokens, of.hidden_size)).astype("<f4")
        return values if dtype == "<f4" else (values.view("<u4") >> 16).astype("<u2")

    prefix, prefix_ids = states(shared), random.integers(0, 50_000, shared, dtype=np.int32)
    made = []
    for i in range(count):
        own = 20 + i
        ids = np.concatenate([prefix_ids, random.integers(0, 50_000, own, dtype=np.int32)])
        whole = np.concatenate([prefix, states(own)], axis=1)
        made.append(Made(of.key(ids), ids, np.ones(len(ids), bool), whole))
    return made


def stage(store: Store, sample: Made, shared: int = 2 * C + 100, links: bool = True) -> StagedSample:
    spec = store.stage_spec(links=links) | {"sharing": Sharing(shared)}
    objects = stage_states(store.staging(), sample.key, spec, sample.states, sample.input_ids)
    return StagedSample(sample.key, len(sample.input_ids), objects, sample.loss_mask, 7)


def fill(path: Path, samples: list[Made], **options: Any) -> None:
    with Store.open(path, options.pop("of", IDENTITY)) as store:
        store.commit([stage(store, sample, **options) for sample in samples])
        store.record(SourceRecord(sample.key[:8], sample.key, sample.loss_mask) for sample in samples)


def chunk(path: Path, sample: Made, depth: int, column: int) -> Path:
    return path / f"samples/{sample.key[:2]}/{sample.key}/hidden_states/c.{depth}.{column}.0"


def check(path: Path, samples: list[Made]) -> None:
    """Our own reader, stock zarr and verify all find what was stored."""
    reader = open_store(path)
    for sample in samples:
        assert np.array_equal(reader[sample.key].states_LTH, sample.states)
        group = zarr.open_group(path / f"samples/{sample.key[:2]}/{sample.key}", mode="r")
        assert np.array_equal(group["hidden_states"][:], sample.states)
    found = verify(path)
    assert found.ok
    assert found.leftovers == []


def test_equal_chunks_are_one_file(tmp_path: Path) -> None:
    samples = family()
    fill(tmp_path / "s", samples)
    check(tmp_path / "s", samples)
    for depth in range(4):
        for column in (0, 1):
            assert len({chunk(tmp_path / "s", s, depth, column).stat().st_ino for s in samples}) == 1
        assert len({chunk(tmp_path / "s", s, depth, 2).stat().st_ino for s in samples}) == 3, "the last is its own"
    found = stats(tmp_path / "s")
    directories = [chunk(tmp_path / "s", sample, 0, 0).parent.parent for sample in samples]
    files = [file.stat() for directory in directories for file in directory.rglob("*") if file.is_file()]
    assert found.stored_bytes == sum(file.st_size for file in files)
    assert found.disk_bytes == sum({file.st_ino: file.st_size for file in files}.values())
    assert verify(tmp_path / "s", workers=1).nbytes == found.disk_bytes, "each is read once"


def test_a_later_run_links_to_what_is_there(tmp_path: Path) -> None:
    first, *later = family()
    fill(tmp_path / "s", [first])
    links_in.cache_clear()
    fill(tmp_path / "s", later)
    check(tmp_path / "s", [first, *later])
    assert chunk(tmp_path / "s", first, 0, 0).stat().st_nlink == 4  # three samples and the index


def test_threads_that_stage_equal_chunks_at_once_write_them_once(tmp_path: Path) -> None:
    samples = family(count=8)
    with Store.open(tmp_path / "s", IDENTITY) as store, ThreadPoolExecutor(4) as pool:
        store.commit(list(pool.map(lambda sample: stage(store, sample), samples)))
        store.record()
    check(tmp_path / "s", samples)
    assert chunk(tmp_path / "s", samples[0], 0, 0).stat().st_nlink == 9


def test_chunks_behind_what_is_shared_are_not_offered(tmp_path: Path) -> None:
    fill(tmp_path / "s", family(), shared=C)
    entries = list(links_in(str(tmp_path / "s/.layertap/links")).entries())
    assert len(entries) == 4


def staged(store: Store, sample: Made, sharing: Sharing, rows: Any = None) -> StagedSample:
    states = sample.states if rows is None else rows
    spec = store.stage_spec() | {"sharing": sharing}
    with ThreadPoolExecutor(2) as pool:
        objects = stage_states(store.staging(), sample.key, spec, states, sample.input_ids, pool)
    return StagedSample(sample.key, len(sample.input_ids), objects, sample.loss_mask, 7)


def linking(chunks: Mapping[str, SharedChunk]) -> Sharing:
    """What a sample has in common with others, of which these chunks are staged."""
    return Sharing(2 * C + 100, sorted({(c.start, c.stop) for c in chunks.values()}), lambda: chunks)


def without(sample: Made, sharing: Sharing) -> Any:
    """The states of a sample but for those of linked chunks."""
    rows = sample.states.copy()
    for start, stop in sharing.elsewhere:
        rows[:, start:stop] = 0x7FC0
    return rows


def test_a_chunk_that_is_there_is_linked_to_without_its_rows(tmp_path: Path) -> None:
    first, second = family(count=2)
    with Store.open(tmp_path / "s", IDENTITY) as store:
        seen = Sharing(2 * C + 100)
        of_first = staged(store, first, seen)
        assert {(c.start, c.stop, c.depths) for c in seen.chunks.values()} == {(0, C, 1), (C, 2 * C, 1)}
        assert len(seen.chunks) == 8
        again = linking(seen.chunks)
        of_second = staged(store, second, again, without(second, again))
        assert again.chunks == {}, "they are known already"
        assert {p: o for p, o in of_second.objects.items() if p in seen.chunks} == {
            p: o for p, o in of_first.objects.items() if p in seen.chunks
        }
        store.commit([of_first, of_second])
        store.record()
    check(tmp_path / "s", [first, second])


def test_a_sample_is_not_staged_without_rows_that_are_nowhere(tmp_path: Path) -> None:
    first, second, third = family()
    with Store.open(tmp_path / "s", IDENTITY) as store:
        seen = Sharing(2 * C + 100)
        store.commit([staged(store, first, seen)])
        path = "hidden_states/c.0.0.0"
        chunk = seen.chunks[path]
        with pytest.raises(ChunkGone, match="no chunk that can be linked"):
            staged(store, second, linking({path: chunk._replace(start=1)}))
        spec = store.stage_spec(links=False) | {"sharing": linking(seen.chunks)}
        with pytest.raises(ChunkGone, match="no chunk that can be linked"):
            stage_states(store.staging(), second.key, spec, second.states, second.input_ids)
        at_three_depths = {p: c for p, c in seen.chunks.items() if p != path}
        for lacking in (at_three_depths, at_three_depths | {path: seen.chunks["hidden_states/c.0.1.0"]}):
            with pytest.raises(ChunkGone, match=r"c\.0\.0\.0 was to be linked to"):
                staged(store, second, linking(lacking))
        shutil.rmtree(store.stage_spec()["links"])
        with pytest.raises(ChunkGone, match="cannot be linked to"):
            staged(store, second, linking(seen.chunks))
        # With all its rows it is staged none the less, and what it offers can be linked to again.
        anew = Sharing(2 * C + 100)
        store.commit([staged(store, second, anew)])
        again = linking(anew.chunks)
        store.commit([staged(store, third, again, without(third, again))])
        store.record()
    check(tmp_path / "s", [first, second, third])


def test_what_others_stage_is_asked_for_when_its_own_chunks_are_there(tmp_path: Path) -> None:
    """Samples with ever longer prefixes, which come together, would wait for each other in a row else."""
    first, second = family(count=2)
    with Store.open(tmp_path / "s", IDENTITY) as store:
        seen = Sharing(2 * C + 100)
        store.commit([staged(store, first, seen)])
        ours = Sharing(2 * C + 100, [(0, C)])

        def linked() -> Mapping[str, SharedChunk]:
            assert {(c.start, c.stop) for c in ours.chunks.values()} == {(C, 2 * C)}
            assert all((store.staging() / second.key / path).is_file() for path in ours.chunks)
            return seen.chunks

        ours.linked = linked
        store.commit([staged(store, second, ours, without(second, ours))])
        store.record()
    check(tmp_path / "s", [first, second])


def test_without_links_every_chunk_is_a_file_of_its_own(tmp_path: Path) -> None:
    samples = family()
    fill(tmp_path / "s", samples, links=False)
    check(tmp_path / "s", samples)
    assert chunk(tmp_path / "s", samples[0], 0, 0).stat().st_nlink == 1
    found = stats(tmp_path / "s")
    assert found.disk_bytes == found.stored_bytes


def test_the_rows_of_float8_chunks_are_always_needed(tmp_path: Path) -> None:
    """Their scales are another array's."""
    of = identity(hidden_size=256, stored_as="float8_e4m3")
    seen = Sharing(2 * C + 100)
    with Store.open(tmp_path / "s", of) as store:
        staged(store, family(of=of)[0], seen)
    assert seen.chunks == {}


def test_samples_of_float8_share_their_chunks(tmp_path: Path) -> None:
    of = identity(hidden_size=256, stored_as="float8_e4m3")
    samples = family(of=of)
    fill(tmp_path / "s", samples, of=of)
    assert verify(tmp_path / "s").ok
    assert chunk(tmp_path / "s", samples[0], 3, 1).stat().st_nlink == 4
    reader = open_store(tmp_path / "s")
    shared = [reader[sample.key].hidden_states[:, : 2 * C] for sample in samples]
    assert shared[0].equal(shared[1])


def test_staging_a_sample_again_leaves_others_as_they_are(tmp_path: Path) -> None:
    """Their files must not be written into, since they may be links to chunks of committed samples."""
    first, second = family(count=2)
    fill(tmp_path / "s", [first])
    other = Made(second.key, second.input_ids, second.loss_mask, second.states + 1)
    with Store.open(tmp_path / "s", IDENTITY) as store:
        stage(store, second)
        stage(store, other, links=False)
        stage(store, other)
        stage(store, second)
        stage(store, second)
        store.commit([stage(store, other)])
        store.record()
    check(tmp_path / "s", [first, other])


@pytest.mark.parametrize("code", [errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP])
def test_where_a_file_can_have_no_more_links_it_is_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    samples = family(count=6)
    link = os.link

    def limited(source: Any, target: Any) -> None:
        most = 3 if code == errno.EMLINK else 1
        if Path(source).stat().st_nlink >= most:
            raise OSError(code, os.strerror(code), source)
        link(source, target)

    monkeypatch.setattr(os, "link", limited)
    fill(tmp_path / "s", samples)
    check(tmp_path / "s", samples)
    files = {chunk(tmp_path / "s", sample, 0, 0).stat().st_ino for sample in samples}
    assert len(files) == (3 if code == errno.EMLINK else 6)
    assert stats(tmp_path / "s").disk_bytes < stats(tmp_path / "s").stored_bytes or code != errno.EMLINK


def test_another_fault_of_the_disk_is_no_reason_to_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Any, target: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), source)

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(Exception, match="the disk is full"):
        fill(tmp_path / "s", family())


def test_an_entry_that_a_loss_of_power_has_torn_is_replaced(tmp_path: Path) -> None:
    first, second, third = family()
    fill(tmp_path / "s", [first])
    links = links_in(str(tmp_path / "s/.layertap/links"))
    whole = chunk(tmp_path / "s", first, 0, 0)
    entry = links.directory / content_name(first.states[:1, :C])[:2] / content_name(first.states[:1, :C])
    assert entry.samefile(whole)
    for torn in (b"", b"123", bytes(len(whole.read_bytes())), whole.read_bytes()[:-9]):
        entry.unlink()
        entry.write_bytes(torn)
        links_in.cache_clear()
        fill(tmp_path / "s", [second])
        check(tmp_path / "s", [first, second])
        assert entry.samefile(chunk(tmp_path / "s", second, 0, 0))
        with Store.open(tmp_path / "s", IDENTITY) as store:
            shutil.rmtree(tmp_path / f"s/samples/{second.key[:2]}/{second.key}")
            store.forget([second.key])
    fill(tmp_path / "s", [third])
    check(tmp_path / "s", [first, third])


def test_damage_of_a_shared_file_is_found_in_every_sample_and_mended(tmp_path: Path) -> None:
    samples = family()
    fill(tmp_path / "s", samples)
    with chunk(tmp_path / "s", samples[0], 1, 1).open("r+b") as file:
        file.seek(99)
        file.write(b"wrong")
    found = verify(tmp_path / "s", set_aside=True)
    assert set(found.damaged) == {sample.key for sample in samples}
    links_in.cache_clear()
    fill(tmp_path / "s", samples)
    check(tmp_path / "s", samples)
    assert chunk(tmp_path / "s", samples[0], 1, 1).stat().st_nlink == 4


def test_gc_takes_what_no_sample_has_any_more(tmp_path: Path) -> None:
    samples = family()
    fill(tmp_path / "s", samples)
    assert gc(tmp_path / "s").links == 0
    with Store.open(tmp_path / "s", IDENTITY) as store:
        for sample in samples:
            store.backend.set_aside(sample.key)
        store.forget([sample.key for sample in samples])
    assert stats(tmp_path / "s").disk_bytes == 0
    assert gc(tmp_path / "s").links == 8
    assert list(links_in(str(tmp_path / "s/.layertap/links")).entries()) == []


def test_a_copy_without_its_links_is_the_same_store(tmp_path: Path) -> None:
    samples = family()
    fill(tmp_path / "s", samples)
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    check(tmp_path / "copy", samples)
    entries = [status.st_size for _, status in links_in(str(tmp_path / "s/.layertap/links")).entries()]
    found = gc(tmp_path / "copy")
    assert (found.links, found.nbytes) == (8, sum(entries))
    check(tmp_path / "copy", samples)
    assert stats(tmp_path / "copy").disk_bytes == stats(tmp_path / "copy").stored_bytes


def test_an_object_store_holds_copies(memory: Any) -> None:
    url = memory()
    with Store.open(url, IDENTITY) as store:
        assert "links" not in store.stage_spec()
        samples = family(count=2)
        store.commit([stage(store, sample) for sample in samples])
        store.record()
    assert stats(url).disk_bytes == stats(url).stored_bytes
    assert gc(url).links == 0
