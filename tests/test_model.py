"""Checkpoints: facts from their files, and fingerprints that change with the content."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tasks import model
from tasks.model import Model, ModelError, final_norm, fingerprint, read, resolve

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 4,
    "vocab_size": 10,
    "num_attention_heads": 2,
    "rms_norm_eps": 1e-5,
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file({"model.norm.weight": np.arange(4, dtype=np.float32)}, tmp_path / "model.safetensors")
    return tmp_path


def test_facts_are_read(directory: Path) -> None:
    checkpoint = read(directory)
    assert (checkpoint.architecture, checkpoint.num_layers, checkpoint.hidden_size) == ("LlamaForCausalLM", 2, 4)
    assert checkpoint.num_key_value_heads == 2


def test_a_wrapper_s_language_model_is_what_counts(directory: Path) -> None:
    wrapped = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": CONFIG, "vision_config": {}}
    (directory / "config.json").write_text(json.dumps(wrapped))
    assert read(directory).hidden_size == 4
    assert read(directory).architecture == "KimiK25ForConditionalGeneration"


def test_the_final_norm_is_found(directory: Path) -> None:
    weight, eps = final_norm(read(directory))
    assert weight.tolist() == [0, 1, 2, 3]
    assert eps == 1e-5


def test_the_fingerprint_follows_weights_and_config(directory: Path) -> None:
    before = fingerprint(directory)
    assert fingerprint(directory) == before
    save_file({"model.norm.weight": np.arange(1, 5, dtype=np.float32)}, directory / "model.safetensors")
    weights_changed = fingerprint(directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0}))
    assert len({before, weights_changed, fingerprint(directory)}) == 3


def test_the_fingerprint_ignores_what_decides_no_value(directory: Path) -> None:
    before = fingerprint(directory)
    (directory / "README.md").write_text("hello")
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=3))
    assert fingerprint(directory) == before


def test_code_counts_only_where_it_runs(directory: Path) -> None:
    before = fingerprint(directory), fingerprint(directory, code=True)
    (directory / "modeling.py").write_text("x = 1")
    after = fingerprint(directory), fingerprint(directory, code=True)
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("place", [0.0, 0.001, 0.5, 1.0])
def test_a_large_file_counts_by_blocks_from_first_to_last_byte(
    directory: Path, place: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "WHOLE_FILE_BYTES", 1 << 20)
    size = 2 * model.BLOCKS_PER_FILE * model.BLOCK_BYTES
    path = directory / "model.bin"
    path.write_bytes(bytes(size))
    before = fingerprint(directory)
    with path.open("r+b") as file:
        block = round(place * (model.BLOCKS_PER_FILE - 1))
        file.seek((size - model.BLOCK_BYTES) * block // (model.BLOCKS_PER_FILE - 1))
        file.write(b"\x01")
    assert fingerprint(directory) != before


def test_a_snapshot_of_the_hub_is_named_by_its_commit(directory: Path) -> None:
    snapshot = directory / "models--a--b" / "snapshots" / ("0123456789" * 4)
    snapshot.mkdir(parents=True)
    assert fingerprint(snapshot) == "hub:" + "0123456789" * 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 7168}, r"model.hidden_size is configured as 7168, but .* has 4"),
        ({"num_layers": 61}, r"model.num_layers is configured as 61, but .* has 2"),
        ({"revision": "main"}, r"model.revision is for the hub"),
    ],
)
def test_another_model_than_configured_is_refused(directory: Path, changes: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve(Model.model_validate({"path": str(directory)} | changes))


def test_a_missing_directory_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="does not exist"):
        resolve(Model(path=str(tmp_path / "nothing")))


def test_weights_and_config_are_needed(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(ModelError, match="holds no weights"):
        read(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="does not describe a language model"):
        read(tmp_path)
