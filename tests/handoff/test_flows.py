"""The flows and their verbs: chunks, reruns, what is printed and how they end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from flows.cli import app
from flows.export import export
from flows.import_files import import_files
from tasks.handoff.export import ExportReport
from tasks.handoff.intake import ImportReport
from tasks.store import open as open_store
from tests.handoff.conftest import Real

pytestmark = pytest.mark.usefixtures("prefect_server")


def invoke(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "300"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_an_export_in_chunks_and_an_import_of_it(real: Real, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(real.checkpoint.path.parent))
    state: Any = export(str(real.store), tmp_path / "e", "speculators", chunk_tokens=100, return_state=True)
    report: Any = state.result()
    assert isinstance(report, ExportReport)
    assert state.is_completed()
    assert (report.rows, report.written, report.complete) == (6, 6, True)

    (tmp_path / "e" / "hidden_states" / "hs_3.safetensors").write_bytes(b"cut off")
    state = import_files(
        tmp_path / "e",
        str(tmp_path / "s"),
        "speculators",
        str(real.checkpoint.path),
        chunk_tokens=100,
        return_state=True,
    )
    taken: Any = state.result(raise_on_failure=False)
    assert isinstance(taken, ImportReport)
    assert state.is_failed()
    assert state.message == f"5 of 6 files are in {tmp_path / 's'}, 1 refused"
    reader = open_store(tmp_path / "s")
    (run,) = reader.runs()
    assert run["imported"] == {"from": "speculators", "files": 6}
    assert run["model"] == {"path": f"~/{real.checkpoint.path.name}"}
    assert reader.final_norm is not None

    again: Any = export(str(real.store), tmp_path / "e", "speculators", return_state=True)
    assert (again.result().present, again.result().written) == (5, 1)


def test_the_verbs(real: Real, tmp_path: Path) -> None:
    arguments = ("export", real.store, tmp_path / "e", "--to", "model-optimizer", "--draft-vocab", 50)
    code, output = invoke(*arguments)
    assert (code, "name it with --model" in output) == (1, True)
    code, output = invoke(*arguments, "--model", real.checkpoint.path)
    assert code == 0, output
    assert "0 were there, 6 written" in output
    assert f"offline_data_path: {tmp_path / 'e'}/samples; eagle_aux_hidden_state_layer_ids: [1, 14, 26]" in output
    assert re.search(r"draft vocabulary: covers \d+\.\d+% of the supervised tokens", output)
    assert torch.load(tmp_path / "e" / "d2t.pt", weights_only=True).shape == (50,)
    described = json.loads((tmp_path / "e" / "layertap-export.json").read_text())
    assert described["layer_ids"] == [1, 14, 26]
    assert described["final_state"] == "after the final norm"

    code, output = invoke(
        "import", tmp_path / "e", tmp_path / "s", "--from", "model-optimizer", "--model", real.checkpoint.path
    )
    assert code == 0, output
    assert "6 committed" in output
    assert re.search(r"\d+\.\d% of \d+ rows predict their next token", output)
    code, output = invoke("audit", tmp_path / "s", "--html", tmp_path / "audit.html")
    assert code == 0, output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--to", "eagle"), "choose from speculators, specforge"),
        (("--to", "speculators", "--depths", "2,15,26"), "lacks r_26"),
        (("--to", "speculators", "--depths", "two"), "write numbers with commas"),
    ],
)
def test_what_cannot_be_exported_ends_with_the_reason(
    arguments: tuple[str, ...], message: str, real: Real, tmp_path: Path
) -> None:
    code, output = invoke("export", real.store, tmp_path / "e", *arguments)
    assert code == 1
    assert re.search(message, output)
    assert not (tmp_path / "e").exists()


def test_a_broken_dump_ends_the_verb_with_the_files_named(real: Real, tmp_path: Path) -> None:
    assert invoke("export", real.store, tmp_path / "e", "--to", "specforge")[0] == 0
    (tmp_path / "e" / "rows_0-2000" / "data_2.ckpt").write_bytes(b"cut off")
    code, output = invoke(
        "import", tmp_path / "e", tmp_path / "s", "--from", "specforge", "--model", real.checkpoint.path
    )
    assert code == 1
    assert re.search(r"data_2\.ckpt: unreadable: no plain tensors can be read from it", output)
    assert "5 of 6 files are in" in output
