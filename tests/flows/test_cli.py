"""The command line: what it prints and how it ends."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner

from flows.cli import app
from tasks.store import SourceRecord, StagedSample, StateSpec, Store
from tasks.store.stage import stage_states
from tests.checkpoints import checkpoint_path
from tests.test_vocabulary import IDENTITY

LENGTHS = (5, 9)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """A store with two samples."""
    url = tmp_path / "store"
    with Store.open(url, IDENTITY, run="test") as store:
        spec = StateSpec.of(IDENTITY)
        samples = []
        for n in LENGTHS:
            ids = np.arange(n, dtype=np.int32)
            states = np.random.default_rng(n).integers(0, 1000, size=IDENTITY.shape(n), dtype=np.uint16)
            key = IDENTITY.key(ids)
            objects = stage_states(store.staging(), key, spec, states, ids)
            samples.append(StagedSample(key, n, objects, np.ones(n, bool), next_token=1, sources=(f"chat/{n}",)))
        store.commit(samples)
        store.record([SourceRecord(f"chat/{n}", s.key, s.loss_mask) for n, s in zip(LENGTHS, samples, strict=True)])
    return url


def invoke(*arguments: Any) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def a_data_file(store: Path) -> Path:
    return max((p for p in (store / "samples").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def test_show_lists_samples_with_shape_depths_and_source(filled: Path) -> None:
    code, output = invoke("show", filled)
    assert code == 0
    assert "2 samples" in output
    assert "[2, 9, 256]" in output
    assert "r_1, r_3" in output
    assert "chat/9" in output


def test_verify_passes_on_a_whole_store_and_names_the_damaged_sample(filled: Path) -> None:
    code, output = invoke("verify", filled)
    assert (code, "2 samples checked" in output) == (0, True)
    file = a_data_file(filled)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    code, output = invoke("verify", filled)
    assert code == 1
    assert "1 damaged" in output
    assert f"damaged {IDENTITY.key(np.arange(9))}" in output
    assert f"`layertap verify {filled} --set-aside` and extract again" in output.splitlines()[-1]
    code, output = invoke("verify", filled, "--set-aside")
    assert code == 1
    assert output.splitlines()[-1].startswith("1 damaged samples were taken out of the store: extract again")
    assert invoke("verify", filled)[0] == 0


def test_verify_fails_on_samples_that_are_not_in_the_manifest(filled: Path) -> None:
    shutil.rmtree(filled / ".layertap")
    code, output = invoke("verify", filled)
    assert code == 1
    assert "2 not in the manifest" in output
    assert output.splitlines()[-1].startswith(f"`layertap repair {filled}` rebuilds the manifest")


def test_repair_lists_samples_whose_manifest_was_lost(filled: Path) -> None:
    for segment in (filled / ".layertap" / "manifest").iterdir():
        segment.unlink()
    code, output = invoke("repair", filled)
    assert (code, "2 samples listed (2 added" in output) == (0, True)
    assert "chat/5" in invoke("show", filled)[1]


def test_stats_and_gc(filled: Path) -> None:
    code, output = invoke("stats", filled)
    assert code == 0
    assert "2 of 2 source ids" in output
    assert "min 5" in output
    code, output = invoke("gc", filled)
    assert (code, "removed 0 staging directories" in output) == (0, True)


def test_a_draft_vocabulary_counts_the_supervised_tokens_of_all_samples(filled: Path, tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "vocab_size": 12,
        "num_attention_heads": 8,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"x": np.zeros(1)}, tmp_path / "model.safetensors")
    out = tmp_path / "vocabulary.safetensors"
    code, output = invoke("vocabulary", filled, out, "--size", 5, "--model", tmp_path)
    assert code == 0
    assert "5 of 12 tokens cover 71.43%" in output  # ids 0 to 4 are in both samples: 10 of 14
    assert out.stat().st_mode == (tmp_path / "config.json").stat().st_mode
    tables = load_file(out)
    assert tables["token_freq"].tolist() == [2, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0]
    assert tables["d2t"].tolist() == [0, 0, 0, 0, 0]
    assert tables["t2d"].tolist() == [True] * 5 + [False] * 7
    assert invoke("vocabulary", filled, out, "--size", 13, "--model", tmp_path)[0] == 1


@pytest.mark.parametrize("verb", ["show", "verify", "stats", "repair", "gc"])
def test_what_is_no_store_is_an_error_and_stays_as_it_is(verb: str, tmp_path: Path) -> None:
    from tasks.store.errors import StoreError

    with pytest.raises(StoreError):
        invoke(verb, tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []


def test_a_preset_that_is_wrong_ends_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"model": {"path": "m"}}))
    code, output = invoke("extract", path)
    assert code == 1
    assert "layers is missing" in output
    assert "pydantic" not in output


def test_what_an_error_says_is_not_taken_for_markup(capsys: pytest.CaptureFixture[str]) -> None:
    from flows.terminal import stop

    stop(ValueError("chats.jsonl:1: not JSON [json] [/x]"))
    assert "not JSON [json] [/x]" in capsys.readouterr().err


def test_tokenize_lists_every_row_that_is_skipped_and_ends_with_1_if_all_are(tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    path = tmp_path / "mine.yaml"
    path.write_text(
        json.dumps(
            {
                "model": {"path": str(checkpoint_path("llama"))},
                "layers": {"ids": [0], "convention": "input"},
                "data": {"path": str(chats), "processes": 1},
                "store": "s",
            }
        )
    )
    chats.write_text("{\n" * 150 + '{"text": "usable"}\n')
    code, output = invoke("tokenize", path, "--show", 0, "--skipped")
    assert code == 0
    assert output.count("not JSON") == 151, "each, and one as the example of its reason"
    assert "chats.jsonl:150: not JSON" in output
    assert invoke("tokenize", path, "--show", 0)[1].count("not JSON") == 1
    chats.write_text("{\n")
    code, output = invoke("tokenize", path, "--show", 0)
    assert code == 1
    assert "none of the 1 rows of" in output


def test_a_fleet_needs_to_know_its_nodes(tmp_path: Path) -> None:
    for arguments in ([], ["--ray", "--deployment", "extract/x"]):
        code, output = invoke("fleet", tmp_path / "mine.yaml", *arguments)
        assert code == 1
        assert "with --deployment, or use --ray" in output


def test_doctor_explains_the_first_case_ever_reported() -> None:
    code, output = invoke("doctor", "771*[512]", "--layers", 4, "--hidden", 7168, "--lengths", "512,259")
    assert code == 0
    assert "771 = 512 + 259" in output
