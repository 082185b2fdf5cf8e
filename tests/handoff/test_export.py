"""The writer: which depths, what is skipped and what is not, and what a fault leaves behind."""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import load_from_disk
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.handoff.errors import HandoffError
from tasks.handoff.example import Example
from tasks.handoff.export import Export, ExportReport
from tasks.handoff.formats import Format, Found, by_name
from tasks.store import NoSpace, SourceRecord, StorageFailure, Store
from tasks.store import open as open_store
from tasks.verify.reference import load
from tests.handoff.conftest import AUX, IDENTITY, Real, Source, conversations, fill, states
from tests.store.samples import identity, make, stage

TRAINERS = ("speculators", "specforge", "model-optimizer")
NAMES = (*TRAINERS, "safetensors")


def run(store: Path, name: str, directory: Path, aux: tuple[int, ...] | None = None) -> ExportReport:
    """An export from beginning to end."""
    with Export(open_store(store), by_name(name), directory, aux) as target:
        pending, report = target.pending()
        for chunk in target.chunks(pending, 20):
            report.add(target.write(chunk))
        if report.complete:
            target.finish(report)
    return report


def content(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and ".layertap" not in path.parts
    }


def inode(directory: Path, name: str, row: int) -> int:
    pattern = {"speculators": f"hs_{row}.*", "specforge": f"data_{row}.*", "model-optimizer": f"{row:08d}.pt"}[name]
    (path,) = directory.rglob(pattern)
    return path.stat().st_ino


# --- depths


@pytest.mark.parametrize("name", TRAINERS)
def test_a_store_without_a_needed_depth_is_refused_and_told_which(name: str, tmp_path: Path) -> None:
    of = identity(depths=(3, 15, 27, 30), layer_ids=(2, 14, 26, 29))
    with pytest.raises(HandoffError, match=r"reads r_2, r_15, r_27, r_30 .* lacks r_2, it has r_3, r_15, r_27, r_30"):
        by_name(name).select_depths(of)
    assert by_name(name).select_depths(of, (3, 15, 27)) == (3, 15, 27, 30)


def test_r_l_is_needed_too() -> None:
    with pytest.raises(HandoffError, match="lacks r_30"):
        by_name("speculators").select_depths(identity(depths=(2, 15, 27), layer_ids=(2, 15, 27)))


@pytest.mark.parametrize(
    ("name", "ids"), [("speculators", [2, 30, 58]), ("specforge", [1, 29, 57]), ("model-optimizer", [1, 29, 57])]
)
def test_depths_and_the_project_s_own_layer_ids(name: str, ids: list[int]) -> None:
    """Of Kimi-K2.5's 61 layers, as each project numbers them by default."""
    needed = by_name(name).needed_depths(61)
    assert needed == (2, 30, 58, 61)
    assert by_name(name).layer_ids(needed) == ids


@pytest.mark.parametrize("aux", [(), (15, 2, 27), (2, 2, 27), (2, 15, 30), (-1, 2, 3)])
@pytest.mark.parametrize("name", TRAINERS)
def test_depths_that_no_trainer_reads_are_refused(name: str, aux: tuple[int, ...]) -> None:
    with pytest.raises(HandoffError, match="must ascend"):
        by_name(name).needed_depths(30, aux)


def test_specforge_s_models_take_three() -> None:
    with pytest.raises(HandoffError, match="takes 3 auxiliary depths, not 2"):
        by_name("specforge").needed_depths(30, (2, 15))
    assert by_name("speculators").needed_depths(30, (0, 15)) == (0, 15, 30)
    with pytest.raises(HandoffError, match="from 1 to 29"):  # its id -1 would be the embedding
        by_name("model-optimizer").needed_depths(30, (0, 15, 27))


def test_a_model_too_shallow_for_the_defaults_needs_depths() -> None:
    with pytest.raises(HandoffError, match="name others with --depths"):
        by_name("speculators").needed_depths(6)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(HandoffError, match="choose from speculators, specforge, model-optimizer, safetensors"):
        by_name("eagle")


# --- the files


@pytest.mark.parametrize("name", NAMES)
def test_exactly_these_files(name: str, made_up: Path, tmp_path: Path, sources: list[Source]) -> None:
    report = run(made_up, name, tmp_path / "e")
    keys = sorted({each.sample.key for each in sources})
    expected = {
        "speculators": {
            *(f"hidden_states/hs_{row}.safetensors" for row in range(6)),
            *("data-00000-of-00001.arrow", "dataset_info.json", "state.json", "token_freq.pt"),
        },
        "specforge": {f"rows_0-2000/data_{row}.ckpt" for row in range(6)},
        "model-optimizer": {f"samples/{row:08d}.pt" for row in range(6)},
        "safetensors": {*(f"samples/{key}.safetensors" for key in keys), "index.jsonl"},
    }[name]
    assert set(content(tmp_path / "e")) == expected | {"layertap-export.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["e"]  # a source id that climbs went nowhere
    rows = 4 if name == "safetensors" else 6
    assert (report.rows, report.single_token, report.message) == (
        rows,
        1,
        f"{rows} of {rows} rows in {tmp_path / 'e'}, 0 failed",
    )
    assert report.unsupervised == 1


@pytest.mark.parametrize("name", NAMES)
def test_others_may_read_the_files_if_the_umask_lets_them(name: str, made_up: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        run(made_up, name, tmp_path / "e")
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "e").rglob("*") if path.is_file()]
    assert {oct(path.stat().st_mode) for path in files} == {"0o100640"}


def test_rows_of_equal_content_share_one_file(made_up: Path, tmp_path: Path) -> None:
    """Rows 2, 4 and 5 have the same tokens; 4 and 5 the same mask, too, which only speculators keeps elsewhere."""
    shared = {name: run(made_up, name, tmp_path / name).linked for name in TRAINERS}
    assert shared == {"speculators": 2, "specforge": 1, "model-optimizer": 0}
    assert len({inode(tmp_path / "speculators", "speculators", row) for row in (2, 4, 5)}) == 1
    assert len({inode(tmp_path / "specforge", "specforge", row) for row in (2, 4, 5)}) == 2


def test_without_hard_links_files_are_copied(made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    linked = tmp_path / "linked"
    run(made_up, "speculators", linked)

    def refuse(*_: object) -> None:
        raise PermissionError("no hard links here")

    monkeypatch.setattr("os.link", refuse)
    run(made_up, "speculators", tmp_path / "copied")
    assert (
        content(tmp_path / "copied")["hidden_states/hs_5.safetensors"]
        == content(linked)["hidden_states/hs_2.safetensors"]
    )
    assert len({inode(tmp_path / "copied", "speculators", row) for row in (2, 4, 5)}) == 3


def test_speculators_data_set_has_the_rows_in_order(made_up: Path, tmp_path: Path, sources: list[Source]) -> None:
    run(made_up, "speculators", tmp_path / "e")
    data = load_from_disk(tmp_path / "e")
    assert data.format["type"] == "torch"
    assert data["source_id"][:] == [each.source_id for each in sources]
    assert data["seq_len"][:].tolist() == [1, 7, 12, 500, 12, 12]


def test_plain_safetensors_have_one_tensor_a_depth(made_up: Path, tmp_path: Path, sources: list[Source]) -> None:
    run(made_up, "safetensors", tmp_path / "e", (3, 30))
    index = [json.loads(line) for line in (tmp_path / "e" / "index.jsonl").read_text().splitlines()]
    shared = next(line for line in index if line["num_tokens"] == 12)
    assert shared["source_ids"] == ["unsupervised", "the same tokens", "the same tokens and mask"]
    long = next(line for line in index if line["num_tokens"] == 500)
    with safe_open(tmp_path / "e" / long["file"], framework="pt") as file:
        assert sorted(file.keys()) == ["input_ids", "loss_mask", "r_3", "r_30"]
        rows = file.get_slice("r_3")[10:20]
    assert torch.equal(rows, states(sources[3].sample)[1, 10:20])


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=15)
@given(num_tokens=st.integers(1, 20), dtype=st.sampled_from([torch.float32, torch.bfloat16]), seed=st.integers(0, 99))
def test_a_file_gives_back_what_was_written(
    name: str, tmp_path_factory: pytest.TempPathFactory, num_tokens: int, dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    example = Example(
        "a/../b",
        "k",
        torch.randint(0, 9, (num_tokens,), generator=generator),
        torch.randint(0, 2, (num_tokens,), generator=generator),
        torch.randn(4, num_tokens, 8, generator=generator).to(dtype),
        is_normed=by_name(name).takes_normed,
    )
    path = tmp_path_factory.mktemp("file") / f"x{by_name(name).suffixes[0]}"
    by_name(name).write(path, example, (2, 15, 27, 30))
    assert path.stat().st_size <= by_name(name).nbytes(num_tokens, example.states_LTH.nbytes)
    found = by_name(name).load(Found(path))
    assert torch.equal(found.states_LTH, example.states_LTH)
    assert found.states_LTH.dtype == dtype
    assert torch.equal(found.input_ids_T, example.input_ids_T)
    assert not by_name(name).holds_mask or torch.equal(found.loss_mask_T, example.loss_mask_T)
    assert found.is_normed == example.is_normed


# --- the final norm


@pytest.fixture(scope="module")
def hugging_face(real: Real) -> list[torch.Tensor]:
    """[T, H] of each sample, what Hugging Face calls the last hidden state: after the norm."""
    model = load(real.checkpoint.path)
    with torch.inference_mode():
        return [
            model(torch.from_numpy(ids.astype(np.int64))[None], output_hidden_states=True).hidden_states[-1][0]
            for ids in real.ids
        ]


@pytest.mark.parametrize("name", ["specforge", "model-optimizer"])
def test_final_states_are_hugging_face_s_after_the_norm(
    name: str, real: Real, hugging_face: list[torch.Tensor], tmp_path: Path
) -> None:
    run(real.store, name, tmp_path / "e")
    of = by_name(name)
    for row, found in enumerate(of.scan(tmp_path / "e")):
        example = of.load(found)
        assert example.is_normed
        torch.testing.assert_close(example.states_LTH[-1], hugging_face[row], rtol=1e-6, atol=1e-6)


def test_speculators_final_states_are_before_the_norm(
    real: Real, hugging_face: list[torch.Tensor], tmp_path: Path
) -> None:
    run(real.store, "speculators", tmp_path / "e")
    norm = load(real.checkpoint.path).model.norm
    for row in range(len(real.ids)):
        last_TH = load_file(tmp_path / "e" / "hidden_states" / f"hs_{row}.safetensors")["hidden_states"][:, -1]
        with torch.inference_mode():
            torch.testing.assert_close(norm(last_TH), hugging_face[row], rtol=1e-6, atol=1e-6)
        assert (last_TH - hugging_face[row]).norm() > last_TH.norm() / 2


def test_of_an_fp8_store_the_values_are_what_reading_it_gives(tmp_path: Path) -> None:
    of = replace(IDENTITY, stored_as="float8_e4m3")
    fill(tmp_path / "s", of, conversations(of))
    run(tmp_path / "s", "speculators", tmp_path / "e")
    reader = open_store(tmp_path / "s")
    for row, source in enumerate(reader.source_ids):
        states_LTH = reader.read(source, (*AUX, 30)).hidden_states
        found = load_file(tmp_path / "e" / "hidden_states" / f"hs_{row}.safetensors")["hidden_states"]
        assert found.dtype == torch.bfloat16
        assert torch.equal(found.transpose(0, 1), states_LTH)


def test_a_store_without_the_norm_goes_to_speculators_only(tmp_path: Path, sources: list[Source]) -> None:
    fill(tmp_path / "s", IDENTITY, sources, norm=None)
    assert run(tmp_path / "s", "speculators", tmp_path / "e").complete
    with pytest.raises(HandoffError, match="after the final norm, which the store does not hold"):
        run(tmp_path / "s", "specforge", tmp_path / "f")
    assert not (tmp_path / "f").exists()


# --- again


@pytest.mark.parametrize("name", NAMES)
def test_a_rerun_writes_nothing_and_changes_nothing(name: str, made_up: Path, tmp_path: Path) -> None:
    first = run(made_up, name, tmp_path / "e")
    before = content(tmp_path / "e")
    again = run(made_up, name, tmp_path / "e")
    assert (again.present, again.written, again.linked, again.nbytes) == (first.rows, 0, 0, 0)
    assert content(tmp_path / "e") == before


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def another(path: Path) -> None:
    save_file({"hidden_states": torch.zeros(7, 4, 32), "token_ids": torch.arange(7)}, path)


@pytest.mark.parametrize("damage", [truncate, flip, another, Path.unlink])
def test_a_file_with_the_right_name_and_other_bytes_is_written_again(
    damage: Callable[[Path], None], made_up: Path, tmp_path: Path
) -> None:
    run(made_up, "speculators", tmp_path / "e")
    before = content(tmp_path / "e")
    damage(tmp_path / "e" / "hidden_states" / "hs_1.safetensors")
    report = run(made_up, "speculators", tmp_path / "e")
    assert (report.present, report.written) == (5, 1)
    assert content(tmp_path / "e") == before


def test_one_damaged_of_linked_files_is_mended_for_all(made_up: Path, tmp_path: Path) -> None:
    run(made_up, "speculators", tmp_path / "e")
    before = content(tmp_path / "e")
    flip(tmp_path / "e" / "hidden_states" / "hs_4.safetensors")  # the same file as rows 2 and 5
    report = run(made_up, "speculators", tmp_path / "e")
    assert (report.present, report.written, report.linked) == (3, 1, 2)
    assert content(tmp_path / "e") == before


def test_a_missing_link_is_made_again_from_another(made_up: Path, tmp_path: Path) -> None:
    run(made_up, "speculators", tmp_path / "e")
    (tmp_path / "e" / "hidden_states" / "hs_2.safetensors").unlink()
    report = run(made_up, "speculators", tmp_path / "e")
    assert (report.present, report.written, report.linked) == (5, 0, 1)
    assert len({inode(tmp_path / "e", "speculators", row) for row in (2, 4, 5)}) == 1


def test_a_torn_journal_costs_the_file_it_tore(made_up: Path, tmp_path: Path) -> None:
    run(made_up, "specforge", tmp_path / "e")
    truncate(tmp_path / "e" / ".layertap" / "journal.jsonl")
    truncate(tmp_path / "e" / ".layertap" / "journal.jsonl")
    report = run(made_up, "specforge", tmp_path / "e")
    assert (report.present, report.written + report.linked) == (5, 1)
    assert run(made_up, "specforge", tmp_path / "e").present == 6


def test_an_interrupted_export_goes_on_and_is_no_data_set_before(made_up: Path, tmp_path: Path) -> None:
    with Export(open_store(made_up), by_name("speculators"), tmp_path / "e") as target:
        pending, _ = target.pending()
        target.write(pending[:2])
    assert not (tmp_path / "e" / "state.json").exists()
    report = run(made_up, "speculators", tmp_path / "e")
    assert (report.present, report.written, report.linked) == (2, 2, 2)
    assert len(load_from_disk(tmp_path / "e")) == 6


def test_a_store_that_grew_and_changed_is_followed(tmp_path: Path, sources: list[Source]) -> None:
    """A new conversation is written, a changed mask is taken over, and the states stay."""
    fill(tmp_path / "s", IDENTITY, sources)
    run(tmp_path / "s", "specforge", tmp_path / "e")
    with Store.open(tmp_path / "s", IDENTITY, run="more") as store:
        new = make(IDENTITY, 9)
        store.commit([stage(store, new)])
        store.record([SourceRecord("new", new.key, new.loss_mask)])
        store.record([SourceRecord("long", sources[3].sample.key, np.ones(500, bool))])
    report = run(tmp_path / "s", "specforge", tmp_path / "e")
    assert (report.rows, report.present, report.written) == (7, 5, 2)
    changed = torch.load(tmp_path / "e" / "rows_0-2000" / "data_3.ckpt", weights_only=True)
    assert changed["loss_mask"].all()


def test_files_of_samples_that_left_the_store_go(tmp_path: Path, sources: list[Source]) -> None:
    """SpecForge's reader takes every file it finds."""
    fill(tmp_path / "s", IDENTITY, sources)
    run(tmp_path / "s", "specforge", tmp_path / "e")
    with Store.open(tmp_path / "s", IDENTITY, run="less") as store:
        store.backend.set_aside(sources[3].sample.key)
        store.forget([sources[3].sample.key])
    report = run(tmp_path / "s", "specforge", tmp_path / "e")
    assert (report.rows, report.removed) == (5, 1)
    assert len(list((tmp_path / "e").rglob("*.ckpt"))) == 5


# --- what is refused


def test_another_export_s_directory_is_refused(made_up: Path, tmp_path: Path) -> None:
    run(made_up, "speculators", tmp_path / "e")
    before = content(tmp_path / "e")
    with pytest.raises(HandoffError, match=r"depths \[2, 15, 27, 30\] instead of \[3, 15, 27, 30\]"):
        run(made_up, "speculators", tmp_path / "e", (3, 15, 27))
    with pytest.raises(HandoffError, match="format 'speculators' instead of 'specforge'"):
        run(made_up, "specforge", tmp_path / "e")
    assert content(tmp_path / "e") == before


def test_a_directory_with_other_things_is_refused(made_up: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.ckpt").write_text("precious")
    with pytest.raises(HandoffError, match="not empty"):
        run(made_up, "specforge", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.ckpt"]


def test_one_export_writes_to_a_directory_at_a_time(made_up: Path, tmp_path: Path) -> None:
    with (
        Export(open_store(made_up), by_name("specforge"), tmp_path / "e"),
        pytest.raises(HandoffError, match="another export is writing"),
    ):
        run(made_up, "specforge", tmp_path / "e")


def test_what_does_not_fit_is_refused_before_anything_is_written(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with Export(open_store(made_up), by_name("specforge"), tmp_path / "e") as target:
        pending, _ = target.pending()
        with pytest.raises(NoSpace, match="go on with --force"):
            target.require_room(pending)
        assert target.require_room(pending, force=True) > 500 * 4 * 32 * 2
    assert list((tmp_path / "e").rglob("*.ckpt")) == []


def test_a_damaged_sample_fails_its_rows_and_leaves_the_export_unfinished(
    tmp_path: Path, sources: list[Source]
) -> None:
    fill(tmp_path / "s", IDENTITY, sources)
    key = sources[2].sample.key
    flip(tmp_path / "s" / "samples" / key[:2] / key / "hidden_states" / "c.0.0.0")
    report = run(tmp_path / "s", "speculators", tmp_path / "e")
    assert set(report.failed) == {"unsupervised", "the same tokens", "the same tokens and mask"}
    assert "does not match its checksum" in report.failed["the same tokens"]
    assert (report.written, report.complete) == (3, False)
    assert not (tmp_path / "e" / "state.json").exists()


def test_a_full_disk_says_so_and_the_next_run_goes_on(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of, calls = by_name("specforge"), []

    def write(self: Format, path: Path, example: Example, depths: object) -> None:
        calls.append(path)
        if len(calls) == 3:
            raise OSError(28, "No space left on device", str(path))
        written(self, path, example, depths)  # type: ignore[arg-type]

    written = type(of).write
    monkeypatch.setattr(type(of), "write", write)
    with pytest.raises(StorageFailure, match="the disk is full"):
        run(made_up, "specforge", tmp_path / "e")
    report = run(made_up, "specforge", tmp_path / "e")
    assert (report.present, report.complete) == (2, True)


def test_a_disk_that_alters_what_is_written_is_found(
    made_up: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of = by_name("specforge")
    written = type(of).write

    def write(self: Format, path: Path, example: Example, depths: tuple[int, ...]) -> None:
        states_LTH = example.states_LTH.clone()
        if example.num_tokens == 7:
            states_LTH[1, 3, 5] += 1
        written(self, path, replace(example, states_LTH=states_LTH), depths)

    monkeypatch.setattr(type(of), "write", write)
    report = run(made_up, "specforge", tmp_path / "e")
    assert list(report.failed) == ["../../etc/passwd"]
    assert "does not read as it was written" in report.failed["../../etc/passwd"]
