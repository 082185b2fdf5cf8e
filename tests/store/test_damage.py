"""Every flipped byte, every truncation and every missing file is found, by reader and verify alike."""

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tasks.store
from tasks.store import DamagedSample, DamagedStore, IdentityMismatch, NotAStore, Reader, Store
from tasks.store.backend import open_backend
from tasks.store.layout import sample_path
from tasks.store.maintenance import gc, repair, stats, verify
from tasks.store.root import COPY
from tests.store.samples import fill, identity, make

LENGTHS = (1, 5, 514)
SMALL = {"hidden_size": 4, "depths": (1, 2), "layer_ids": (0, 1)}


@pytest.fixture(scope="module", params=["exact", "float8_e4m3"])
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    place = tmp_path_factory.mktemp("damage")
    with Store.open(place, identity(**SMALL, stored_as=request.param)) as store:
        fill(store, [make(store.identity, n) for n in LENGTHS])
    return tasks.store.open(place)


def files(reader: Reader, position: int) -> list[Path]:
    directory = Path(reader.url) / sample_path(reader.keys[position])
    return [directory / name for name in reader.spec.files(LENGTHS[position])]


def is_refused(reader: Reader, position: int) -> bool:
    try:
        reader.read(position)
    except DamagedSample as error:
        return error.key == reader.keys[position]
    return False


@pytest.mark.parametrize("position", [0, 2])
def test_every_byte(reader: Reader, position: int) -> None:
    for file in files(reader, position):
        content = file.read_bytes()
        # One bit of each byte, a different one each time; hypothesis below draws from all.
        for place in range(0, len(content), 1 if len(content) < 100 else 13):
            altered = bytearray(content)
            altered[place] ^= 1 << (place % 8)
            file.write_bytes(altered)
            assert is_refused(reader, position), (file, place)
        file.write_bytes(content)
    reader.read(position)


@st.composite
def damages(draw: st.DrawFn) -> tuple[int, int, str, int, int]:
    return (
        draw(st.integers(0, len(LENGTHS) - 1)),
        draw(st.integers(0, 30)),
        draw(st.sampled_from(["flip", "truncate", "extend", "remove"])),
        draw(st.integers(0, 10_000)),
        draw(st.integers(1, 255)),
    )


def inflict(file: Path, how: str, place: int, bits: int) -> None:
    content = bytearray(file.read_bytes())
    if how == "remove":
        file.unlink()
        return
    if how == "flip":
        content[place % len(content)] ^= bits
    elif how == "truncate":
        del content[place % len(content) :]
    else:
        content += bytes([bits])
    file.write_bytes(content)


@settings(max_examples=150, deadline=None)
@given(st.lists(damages(), min_size=1, max_size=3))
def test_any_damage(reader: Reader, inflicted: list[tuple[int, int, str, int, int]]) -> None:
    expected, kept = set(), {}
    try:
        for position, number, how, place, bits in inflicted:
            candidates = files(reader, position)
            file = candidates[number % len(candidates)]
            if file not in kept:  # two flips of one byte could cancel out
                kept[file] = file.read_bytes()
                inflict(file, how, place, bits)
                expected.add(position)
        for position in range(len(LENGTHS)):
            assert is_refused(reader, position) == (position in expected)
        assert set(verify(reader.url, workers=1).damaged) == {reader.keys[p] for p in expected}
    finally:
        for file, content in kept.items():
            file.write_bytes(content)


def test_a_sample_whose_directory_is_gone(reader: Reader, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(reader.url, copy)
    shutil.rmtree(copy / sample_path(reader.keys[1]))
    assert verify(copy).damaged == {reader.keys[1]: "its directory or its zarr.json is missing"}
    with pytest.raises(DamagedSample, match=r"its zarr\.json is missing"):
        tasks.store.open(copy).read(1)


def test_one_sample_in_the_place_of_another(reader: Reader, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(reader.url, copy)
    first, second = (copy / sample_path(key) for key in reader.keys[:2])
    shutil.rmtree(first)
    shutil.copytree(second, first)
    assert is_refused(tasks.store.open(copy), 0)
    assert list(verify(copy).damaged) == [reader.keys[0]]


def edit_root(store: Path, **changes: Any) -> None:
    document = json.loads((store / "zarr.json").read_text())
    document["attributes"] |= changes
    (store / "zarr.json").write_text(json.dumps(document))


def test_an_altered_root_is_named_and_costs_no_sample(tmp_path: Path) -> None:
    samples = [make(identity(), n) for n in LENGTHS]
    with Store.open(tmp_path, identity()) as store:
        fill(store, samples)
    other = identity(depths=(3, 16, 28, 30))
    edit_root(tmp_path, identity=asdict(other))
    for act in (
        tasks.store.open,
        stats,
        gc,
        verify,
        lambda url: verify(url, set_aside=True),
        lambda url: Store.open(url, identity()),
    ):
        with pytest.raises(
            DamagedStore, match=r"`layertap repair .*puts back what it was, the samples need no change"
        ) as refusal:
            act(tmp_path)
        assert "depths [3, 16, 28, 30] instead of [3, 15, 28, 30]" in str(refusal.value)
    edit_root(tmp_path, identity={"model": 1})
    with pytest.raises(DamagedStore, match=r"the identity in .*zarr\.json cannot be read"):
        tasks.store.open(tmp_path)
    assert repair(tmp_path).root
    assert verify(tmp_path).ok


@pytest.mark.parametrize("changes", [{"depths": (3, 16, 28, 30)}, {"hidden_size": 64}, {"model": "hub:other"}])
def test_a_root_that_was_replaced_sets_no_sample_aside(tmp_path: Path, changes: dict[str, Any]) -> None:
    with Store.open(tmp_path, identity()) as store:
        fill(store, [make(identity(), n) for n in LENGTHS])
    other = identity(**changes)
    edit_root(tmp_path, identity=asdict(other), identity_digest=other.digest)
    found = verify(tmp_path, set_aside=True)
    assert (found.ok, found.damaged, found.set_aside) == (False, {}, [])
    first, second = found.other_problems
    assert first.startswith("zarr.json is not what was written: `layertap repair ")
    assert second.startswith("all 3 samples are of another identity than")
    assert "Nothing is set aside" in second
    with pytest.raises(DamagedStore, match="that file was replaced; `layertap repair "):
        Store.open(tmp_path, other)
    (tmp_path / COPY).unlink()
    for act in (repair, gc, lambda url: Store.open(url, other)):
        with pytest.raises(DamagedStore, match="that file was replaced; put back what it was"):
            act(tmp_path)
    edit_root(tmp_path, identity=asdict(identity()), identity_digest=identity().digest)
    assert verify(tmp_path).ok


def test_repair_mends_every_group_that_verify_names(url: str) -> None:
    """A run that died may leave a shard without its document, and without samples, too."""
    with Store.open(url, identity()) as store:
        fill(store, [make(identity(), 5)])
        (shard,) = (name for name in store.backend.names("samples") if name != "zarr.json")
        store.backend.put_all({f"samples/{name}/zarr.json": b"{}" for name in (shard, "00")})
        store.backend.remove("samples/zarr.json")
    assert len(verify(url).store_problems) == 3
    assert repair(url).groups == 3
    assert verify(url).ok


def test_what_is_no_part_of_the_store_is_told_as_that(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity()) as store:
        fill(store, [make(identity(), 5)])
    (tmp_path / "samples/zz").mkdir()
    (tmp_path / "samples/.DS_Store").touch()
    found = verify(tmp_path)
    assert (found.ok, found.strangers) == (True, ["samples/.DS_Store", "samples/zz"])
    assert list(found.remedies("here")) == [
        "no part of the store, and never read: samples/.DS_Store, samples/zz; remove or move it"
    ]


OTHER = identity(depths=(3, 16, 28, 30))


@pytest.fixture(params=["missing", "torn", "altered", "of another format", "of another layout"])
def rootless(request: pytest.FixtureRequest, url: str) -> str:
    """A store of three samples whose root is not what was written."""
    with Store.open(url, identity()) as store:
        fill(store, [make(identity(), n) for n in LENGTHS])
    backend = open_backend(url)
    document = backend.read("zarr.json")
    altered = {
        "missing": None,
        "torn": document[:-9],
        "altered": document.replace(b'"attributes"', b'"attribute{"', 1),
        "of another format": document.replace(b'"layertap"', b'"layertaq"', 1),
        "of another layout": document.replace(b'"layout": 1', b'"layout": 3', 1),
    }[request.param]
    assert altered != document
    with Store.open(url, identity()) as store:
        store.backend.remove("zarr.json") if altered is None else store.backend.put("zarr.json", altered)
    return url


def test_a_lost_root_is_named_and_put_back(rootless: str) -> None:
    for act in (tasks.store.open, stats, gc, verify):
        with pytest.raises(
            DamagedStore, match=r"zarr\.json, the root of the store, (is missing|was altered): `layertap"
        ):
            act(rootless)
    assert repair(rootless).root
    assert verify(rootless).ok
    assert len(tasks.store.open(rootless)) == len(LENGTHS)
    assert not repair(rootless).root


def test_a_lost_root_lets_no_other_extraction_in(rootless: str) -> None:
    before = open_backend(rootless).sizes("samples")
    with pytest.raises((IdentityMismatch, DamagedStore), match="`layertap repair ") as refusal:
        Store.open(rootless, OTHER)
    if isinstance(refusal.value, IdentityMismatch):
        assert "(depths [3, 16, 28, 30] instead of [3, 15, 28, 30])" in str(refusal.value)
    open_backend(rootless).remove(COPY)
    no_way_back = "extract with the settings|use a newer layertap"  # without a copy, another layout may be a newer one
    with pytest.raises((IdentityMismatch, DamagedStore, NotAStore), match=no_way_back):
        Store.open(rootless, OTHER)
    with pytest.raises((DamagedStore, NotAStore), match=no_way_back):
        repair(rootless)
    open_backend(rootless).remove("zarr.json") if "://" in rootless else (Path(rootless) / "zarr.json").unlink(True)
    assert open_backend(rootless).sizes("samples") == before
    with pytest.raises(IdentityMismatch, match=r"has lost its zarr\.json, and holds another extraction"):
        Store.open(rootless, OTHER)
    with Store.open(rootless, identity()) as store:
        assert store.missing([(s.key, len(s.input_ids)) for s in (make(identity(), n) for n in LENGTHS)]) == []
    assert verify(rootless).ok


def test_a_store_from_before_there_was_a_copy_of_the_root_gets_one(tmp_path: Path) -> None:
    with Store.open(tmp_path, identity()) as store:
        fill(store, [make(identity(), 5)])
    (tmp_path / COPY).unlink()
    assert verify(tmp_path).ok
    Store.open(tmp_path, identity()).close()
    (tmp_path / "zarr.json").unlink()
    assert repair(tmp_path).root
    assert verify(tmp_path).ok


def test_samples_of_another_extraction_are_no_damage_and_can_be_moved_out(tmp_path: Path) -> None:
    """As stores may hold them that lost their root before a run was refused for it."""
    mixed, rescued = tmp_path / "mixed", tmp_path / "rescued"
    first, second = ([make(of, n) for n in LENGTHS] for of in (OTHER, identity()))
    with Store.open(mixed, OTHER) as store:
        fill(store, first, prefix="first")
    (mixed / "zarr.json").unlink()
    (mixed / COPY).unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tasks.store.store.refuse_mixture", lambda *_: None)
        with Store.open(mixed, identity()) as store:
            fill(store, second, prefix="second")
    (mixed / sample_path(second[0].key) / "input_ids/c.0").write_bytes(b"")
    found = verify(mixed, set_aside=True)
    assert (set(found.foreign), found.set_aside) == ({s.key for s in first}, [second[0].key])
    assert not found.ok
    assert any("are not damaged" in remedy for remedy in found.remedies("here"))
    with pytest.raises(DamagedSample, match="is not damaged, but it is of another extraction"):
        tasks.store.open(mixed).read("first-0")
    assert set(repair(mixed).foreign) == {s.key for s in first}
    for sample in first:
        (rescued / sample_path(sample.key)).parent.mkdir(parents=True, exist_ok=True)
        (mixed / sample_path(sample.key)).rename(rescued / sample_path(sample.key))
    with pytest.raises(NotAStore, match="is not empty"):
        Store.open(tmp_path, OTHER)
    with pytest.raises(IdentityMismatch):
        Store.open(rescued, identity())
    with Store.open(rescued, OTHER) as store:
        assert store.missing([(s.key, len(s.input_ids)) for s in first]) == []
    repair(rescued)
    assert verify(rescued).ok
    assert len(tasks.store.open(rescued)) == len(first)
    assert verify(mixed).ok
    assert tasks.store.open(mixed).source_ids == ["second-1", "second-2"]
