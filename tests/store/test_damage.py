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
from tasks.store import DamagedSample, DamagedStore, Reader, Store
from tasks.store.layout import sample_path
from tasks.store.maintenance import gc, repair, stats, verify
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
        with pytest.raises(DamagedStore, match="put back what it was, the samples need no change") as refusal:
            act(tmp_path)
        assert "depths [3, 16, 28, 30] instead of [3, 15, 28, 30]" in str(refusal.value)
    edit_root(tmp_path, identity={"model": 1})
    with pytest.raises(DamagedStore, match=r"the identity in .*zarr\.json cannot be read"):
        tasks.store.open(tmp_path)
    edit_root(tmp_path, identity=asdict(identity()))
    assert verify(tmp_path).ok


@pytest.mark.parametrize("changes", [{"depths": (3, 16, 28, 30)}, {"hidden_size": 64}, {"model": "hub:other"}])
def test_a_root_that_was_replaced_sets_no_sample_aside(tmp_path: Path, changes: dict[str, Any]) -> None:
    with Store.open(tmp_path, identity()) as store:
        fill(store, [make(identity(), n) for n in LENGTHS])
    other = identity(**changes)
    edit_root(tmp_path, identity=asdict(other), identity_digest=other.digest)
    found = verify(tmp_path, set_aside=True)
    assert (found.ok, found.damaged, found.set_aside) == (False, {}, [])
    (problem,) = found.other_problems
    assert problem.startswith("all 3 samples are of another identity than")
    assert "Nothing is set aside" in problem
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
