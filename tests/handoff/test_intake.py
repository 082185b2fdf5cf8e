"""The import: good files become the store that they came from, and each bad file is named with its reason."""

import gzip
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.handoff.errors import HandoffError
from tasks.handoff.export import Export
from tasks.handoff.formats import by_name
from tasks.handoff.intake import ImportReport, Intake, identity_of
from tasks.model import final_norm
from tasks.store import FinalNorm, Store
from tasks.store import open as open_store
from tasks.verify.audit import audit
from tasks.verify.config import Audit
from tasks.verify.examine import Examiner
from tasks.verify.proof import Head
from tests.handoff.conftest import Real

TRAINERS = ("speculators", "specforge", "model-optimizer")


@pytest.fixture(scope="module")
def head(real: Real) -> Head:
    return Head(real.checkpoint)


@pytest.fixture(scope="module")
def dumps(real: Real, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """An export of the real states in each format; not to be written to."""
    directories = {}
    for name in TRAINERS:
        directories[name] = tmp_path_factory.mktemp("dump") / name
        with Export(open_store(real.store), by_name(name), directories[name]) as target:
            pending, report = target.pending()
            target.write(pending)
            target.finish(report)
    return directories


def take(
    real: Real, head: Head | None, name: str, directory: Path, store: Path, chunk_tokens: int = 150
) -> ImportReport:
    """An import from beginning to end."""
    of = by_name(name)
    files = of.scan(directory)
    identity = identity_of(of, files, real.checkpoint)
    weight, eps = final_norm(real.checkpoint)
    norm = FinalNorm(weight, eps)
    report = ImportReport(str(store))
    with Store.open(store, identity, run="import", final_norm=norm) as target:
        intake = Intake(of, target, Examiner(real.checkpoint, identity, 1, Audit()), norm, head)
        for chunk in intake.chunks(intake.plan(files, report), chunk_tokens):
            report.add(intake.take(chunk))
    return report


def refused(report: ImportReport) -> dict[str, tuple[str, str]]:
    """File name -> (reason, detail)."""
    return {Path(each.file).name: (each.reason, each.detail) for each in report.refused}


@pytest.mark.parametrize("name", TRAINERS)
def test_what_was_exported_comes_back(
    name: str, real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path
) -> None:
    report = take(real, head, name, dumps[name], tmp_path / "s")
    assert (report.files, report.committed, report.refused) == (6, 6, [])
    assert report.hits / report.rows_predicted > 0.2
    before, after = open_store(real.store), open_store(tmp_path / "s")
    of_files = {"specforge": lambda row: f"rows_0-2000/data_{row}.ckpt"}
    for row, source in enumerate(before.source_ids):
        was, now = before[source], after[of_files.get(name, lambda _, name=source: name)(row)]
        assert now.depths == was.depths
        assert torch.equal(now.hidden_states[:-1], was.hidden_states[:-1])
        assert torch.equal(now.input_ids, was.input_ids)
        assert torch.equal(now.loss_mask, was.loss_mask)
        if name == "speculators":
            assert torch.equal(now.hidden_states[-1], was.hidden_states[-1])
    assert after.identity.last_is_normed == (name != "speculators")
    assert after.identity.digest != before.identity.digest  # imported states never mix with extracted ones


@pytest.mark.parametrize("name", ["speculators", "specforge"])
def test_an_imported_store_passes_the_audit(
    name: str, real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path
) -> None:
    take(real, head, name, dumps[name], tmp_path / "s")
    report = audit(open_store(tmp_path / "s"), head)
    assert report.passed, report.failed
    assert (report.accuracy() or 0) > 0.2


def test_states_after_the_norm_go_on_where_they_are_wanted(
    real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path
) -> None:
    """From SpecForge's files to Model-Optimizer's the final state stays as it is; r_L cannot be had of it."""
    take(real, head, "specforge", dumps["specforge"], tmp_path / "s")
    reader = open_store(tmp_path / "s")
    with Export(reader, by_name("model-optimizer"), tmp_path / "m") as target:
        pending, _ = target.pending()
        target.write(pending)
    for row in range(6):
        ours = torch.load(tmp_path / "m" / "samples" / f"{row:08d}.pt", weights_only=True)
        theirs = torch.load(dumps["specforge"] / "rows_0-2000" / f"data_{row}.ckpt", weights_only=True)
        assert torch.equal(ours["hidden_states"], theirs["hidden_state"][0])
        assert not ours["hidden_states_prenorm"]
    with pytest.raises(HandoffError, match="imported after it, from which r_L cannot be computed"):
        Export(reader, by_name("speculators"), tmp_path / "x")


# --- a dump with faults, of each kind that loaders let pass


@pytest.fixture
def broken(dumps: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of the speculators dump, to be damaged."""
    return Path(shutil.copytree(dumps["speculators"], tmp_path / "broken"))


Change = Callable[[torch.Tensor], torch.Tensor]


def rewrite(directory: Path, row: int, change: Change) -> None:
    """Change a row's states [T, L, H]."""
    path = directory / "hidden_states" / f"hs_{row}.safetensors"
    tensors = load_file(path)
    tensors["hidden_states"] = change(tensors["hidden_states"]).contiguous()
    path.unlink()  # it may be linked to others
    save_file(tensors, path)


def with_nan(states_TLH: torch.Tensor) -> torch.Tensor:
    states_TLH[5, 1, 7] = float("nan")
    return states_TLH


def test_a_broken_dump_is_reported_file_by_file(real: Real, head: Head, broken: Path, tmp_path: Path) -> None:
    """Its own loader takes all of these: NaN, short states, a missing layer, shifted rows."""
    rewrite(broken, 0, with_nan)
    rewrite(broken, 1, lambda states_TLH: states_TLH[:-16])
    rewrite(broken, 2, lambda states_TLH: states_TLH[:, 1:])
    rewrite(broken, 3, lambda states_TLH: torch.cat([states_TLH[1:], states_TLH[:1]]))
    report = take(real, head, "speculators", broken, tmp_path / "s")
    found = refused(report)
    assert {file: reason for file, (reason, _) in found.items()} == {
        "hs_0.safetensors": "finite",
        "hs_1.safetensors": "shape",
        "hs_2.safetensors": "shape",
        "hs_3.safetensors": "shifted",
    }
    lengths = [len(ids) for ids in real.ids]
    assert "by depth: {15: 1}" in found["hs_0.safetensors"][1]
    assert f"{lengths[1] - 16} = {lengths[1]} - 16" in found["hs_1.safetensors"][1]
    assert "a layer is missing: 3 = 4 - 1" in found["hs_2.safetensors"][1]
    assert "rows predict the token 2 ahead instead of the next" in found["hs_3.safetensors"][1]
    assert (report.committed, report.passed) == (2, False)
    reader = open_store(tmp_path / "s")
    assert list(reader.source_ids) == ["chat 4", "chat 5"]
    assert {each["reason"] for each in reader.quarantined()} == {"finite", "shape", "shifted"}


def test_the_good_files_of_a_mended_dump_are_not_taken_again(
    real: Real, head: Head, broken: Path, dumps: dict[str, Path], tmp_path: Path
) -> None:
    rewrite(broken, 0, with_nan)
    assert take(real, head, "speculators", broken, tmp_path / "s").committed == 5
    shutil.copy(dumps["speculators"] / "hidden_states" / "hs_0.safetensors", broken / "hidden_states")
    report = take(real, head, "speculators", broken, tmp_path / "s")
    assert (report.present, report.committed, report.refused) == (5, 1, [])
    assert list(open_store(tmp_path / "s").quarantined()) == []


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        (lambda s: torch.cat([s[:1], s[:-1]]), "shifted", "predict the token 0 ahead"),
        (lambda s: torch.zeros_like(s), "zero_rows", "all-zero rows"),
        (lambda s: torch.cat([s[:40], s[:1].expand(len(s) - 40, -1, -1)]), "repeated_rows", "repeat another token's"),
        (lambda s: s[:, [0, 0, 2, 3]], "distinct_depths", r"hold the same states: [(2, 15)]"),
        (lambda s: s[..., :288], "shape", "288"),
        (lambda s: s.bfloat16(), "dtype", "rank 0 holds bfloat16, expected float32"),
        (lambda s: s[:, :1], "shape", "4"),
        (lambda s: s.transpose(0, 1), "shape", ""),
    ],
)
def test_other_faults_of_one_file(
    change: Change, reason: str, detail: str, real: Real, head: Head, broken: Path, tmp_path: Path
) -> None:
    rewrite(broken, 1, change)
    report = take(real, head, "speculators", broken, tmp_path / "s")
    ((file, found),) = refused(report).items()
    assert (file, found[0]) == ("hs_1.safetensors", reason)
    assert detail in found[1]
    assert report.committed == 5


def test_a_final_norm_that_was_applied_is_proved(real: Real, head: Head, broken: Path, tmp_path: Path) -> None:
    """By the rows' size, and by the next tokens that they predict when the norm is not applied again."""
    weight, eps = final_norm(real.checkpoint)

    def normed(states_TLH: torch.Tensor) -> torch.Tensor:
        return torch.cat([states_TLH[:, :-1], FinalNorm(weight, eps).apply(states_TLH[:, -1])[:, None]], dim=1)

    rewrite(broken, 2, normed)
    ((file, (reason, detail)),) = refused(take(real, head, "speculators", broken, tmp_path / "s")).items()
    assert (file, reason) == ("hs_2.safetensors", "final_norm")
    rows = len(real.ids[2])
    assert f"is after the final norm, and should be before it: {rows} of {rows} rows have the norm's size" in detail
    assert f"of {rows - 1} rows predict their next token" in detail


def test_a_final_norm_that_was_not_applied_is_proved(
    real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(dumps["specforge"], tmp_path / "d"))
    path = directory / "rows_0-2000" / "data_4.ckpt"
    values = torch.load(path, weights_only=True)
    values["hidden_state"] = open_store(real.store)["chat 4"].hidden_states[-1:].clone()
    torch.save(values, path)
    ((file, (reason, detail)),) = refused(take(real, head, "specforge", directory, tmp_path / "s")).items()
    assert (file, reason) == ("data_4.ckpt", "final_norm")
    assert "is before the final norm, and should be after it: 0 of" in detail


def test_without_the_head_the_rows_size_still_tells(real: Real, broken: Path, tmp_path: Path) -> None:
    weight, eps = final_norm(real.checkpoint)
    rewrite(broken, 2, lambda s: torch.cat([s[:, :-1], FinalNorm(weight, eps).apply(s[:, -1])[:, None]], dim=1))
    report = take(real, None, "speculators", broken, tmp_path / "s")
    assert refused(report)["hs_2.safetensors"][0] == "final_norm"
    assert (report.committed, report.rows_predicted) == (5, 0)


# --- files that are not what they should be


def test_files_of_a_dump_that_are_missing_or_not_whole(real: Real, head: Head, broken: Path, tmp_path: Path) -> None:
    folder = broken / "hidden_states"
    (folder / "hs_0.safetensors").unlink()
    (folder / "hs_1.safetensors").write_bytes((folder / "hs_2.safetensors").read_bytes()[:-100])
    shutil.copy(folder / "hs_4.safetensors", folder / "hs_3.safetensors")
    shutil.copy(folder / "hs_4.safetensors", folder / "hs_99.safetensors")
    tensors = load_file(folder / "hs_5.safetensors")
    save_file({"hidden_states": tensors["hidden_states"]}, folder / "hs_5.safetensors")
    found = refused(take(real, head, "speculators", broken, tmp_path / "s"))
    assert {file: reason for file, (reason, _) in found.items()} == {
        "hs_0.safetensors": "missing",
        "hs_1.safetensors": "unreadable",
        "hs_3.safetensors": "token_ids",
        "hs_5.safetensors": "keys",
        "hs_99.safetensors": "unlisted",
    }
    assert "token ids are not the" in found["hs_3.safetensors"][1]
    assert "['token_ids']" in found["hs_5.safetensors"][1]


class Code:
    """Unpickling it would write a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (str(self.path), "w")


def test_code_in_a_file_is_not_run(real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(dumps["model-optimizer"], tmp_path / "d"))
    torch.save({"input_ids": Code(tmp_path / "ran")}, directory / "samples" / "00000000.pt", pickle_module=pickle)
    torch.save(torch.zeros(3), directory / "samples" / "00000001.pt")
    report = take(real, head, "model-optimizer", directory, tmp_path / "s")
    assert {file: reason for file, (reason, _) in refused(report).items()} == {
        "00000000.pt": "unreadable",
        "00000001.pt": "unreadable",
    }
    assert not (tmp_path / "ran").exists()
    assert report.committed == 4


def spoil(path: Path, **changes: Any) -> None:
    torch.save(torch.load(path, weights_only=True) | changes, path)


def test_tensors_that_do_not_belong_together(real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(dumps["specforge"], tmp_path / "d"))
    files = [directory / "rows_0-2000" / f"data_{row}.ckpt" for row in range(6)]
    good = [torch.load(path, weights_only=True) for path in files]
    spoil(files[0], loss_mask=good[0]["loss_mask"][:-1])
    spoil(files[1], hidden_state=good[1]["hidden_state"][:, :-1])
    spoil(files[2], hidden_state=good[2]["hidden_state"].bfloat16())
    spoil(files[3], aux_hidden_state=good[3]["aux_hidden_state"][0])
    spoil(files[4], aux_hidden_state=good[4]["aux_hidden_state"][..., : 2 * 576])
    found = refused(take(real, head, "specforge", directory, tmp_path / "s"))
    assert {file: reason for file, (reason, _) in found.items()} == {
        "data_0.ckpt": "shape",
        "data_1.ckpt": "shape",
        "data_2.ckpt": "dtype",
        "data_3.ckpt": "shape",
        "data_4.ckpt": "shape",
    }
    assert "a layer is missing: 3 = 4 - 1" in found["data_4.ckpt"][1]
    assert "final states torch.bfloat16" in found["data_2.ckpt"][1]


def test_a_flag_that_differs_from_the_others(real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(dumps["model-optimizer"], tmp_path / "d"))
    spoil(directory / "samples" / "00000003.pt", hidden_states_prenorm=True)
    ((file, (reason, detail)),) = refused(take(real, head, "model-optimizer", directory, tmp_path / "s")).items()
    assert (file, reason) == ("00000003.pt", "final_norm")
    assert "it says that its final state is before the final norm" in detail


def test_gzipped_checkpoints_are_read(real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for path in (dumps["specforge"] / "rows_0-2000").iterdir():
        (tmp_path / "d" / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes(), 1))
    assert take(real, head, "specforge", tmp_path / "d", tmp_path / "s").committed == 6


def test_equal_tokens_are_one_sample_if_their_states_are_equal(
    real: Real, head: Head, dumps: dict[str, Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(dumps["model-optimizer"], tmp_path / "d"))
    values = torch.load(directory / "samples" / "00000001.pt", weights_only=True)
    torch.save(values | {"conversation_id": "twin", "loss_mask": values["loss_mask"] * 0}, directory / "a.pt")
    values["aux_hidden_states"] = values["aux_hidden_states"] + 1
    torch.save(values | {"conversation_id": "other"}, directory / "z.pt")
    report = take(real, head, "model-optimizer", directory, tmp_path / "s", chunk_tokens=10_000)
    assert (report.committed, report.duplicates) == (6, 1)
    ((file, (reason, _)),) = refused(report).items()
    assert (file, reason) == ("z.pt", "other_states")
    reader = open_store(tmp_path / "s")
    assert reader.key_of("twin") == reader.key_of("chat 1")
    assert not reader["twin"].loss_mask.any()
    assert reader["chat 1"].loss_mask.all()


@pytest.mark.parametrize("name", TRAINERS)
def test_a_directory_of_something_else_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(HandoffError, match=r"holds no|no data set"):
        by_name(name).scan(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_without_one_readable_file_is_refused(real: Real, tmp_path: Path) -> None:
    (tmp_path / "x.ckpt").write_text("nothing")
    of = by_name("specforge")
    with pytest.raises(HandoffError, match="nothing to import"):
        identity_of(of, of.scan(tmp_path), real.checkpoint)


def test_plain_safetensors_are_not_imported(tmp_path: Path) -> None:
    with pytest.raises(HandoffError, match="cannot be imported"):
        by_name("safetensors").scan(tmp_path)
