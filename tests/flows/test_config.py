"""Configuration: presets load, and what is wrong is refused with the place and the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from flows.config import PRESETS, ConfigError, Extraction
from flows.extract import extract
from tasks.extract.config import Engine
from tasks.vocabulary import Identity

MINIMAL: dict[str, Any] = {
    "model": {"path": "m"},
    "layers": {"ids": [2, 30, 58, 60], "convention": "output"},
    "data": {"path": "chats.jsonl"},
    "store": "s",
}


@pytest.mark.parametrize("preset", sorted(PRESETS.glob("*.yaml")), ids=lambda p: p.stem)
def test_presets_load_and_are_the_flow_s_parameters(preset: Path) -> None:
    loaded = Extraction.load(preset.stem)
    values = extract.validate_parameters({"extraction": yaml.safe_load(preset.read_text())})
    assert values["extraction"] == loaded


def test_the_kimi_preset_is_the_first_target() -> None:
    kimi = Extraction.load("kimi-k25")
    assert kimi.engine.tensor_parallel_size == 8
    assert (kimi.model.hidden_size, kimi.model.num_layers) == (7168, 61)
    assert kimi.layers.ids == (2, 30, 58, 60)
    assert kimi.layers.depths == (3, 31, 59, 61)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": [2, 30]}, "layers"),
        ({"layers": {"ids": [2]}}, "convention"),
        ({"dtype": "float16"}, "DeepSeek models rescale the residual stream"),
        ({"dtype": "int8"}, "bfloat16"),
        ({"unknown": 1}, "Extra inputs are not permitted"),
        ({"engine": {"tensor_paralel_size": 8}}, "Extra inputs are not permitted"),
        ({"engine": {"tensor_parallel_size": 0}}, "greater than or equal to 1"),
        ({"chunk_tokens": 0}, "greater than or equal to 1"),
        ({"store": ""}, "at least 1 character"),
        ({"model": {"path": "m", "trust_remote": True}}, "Extra inputs are not permitted"),
    ],
)
def test_bad_values_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Extraction.model_validate(MINIMAL | change)


def test_bounds_are_in_the_schema_so_that_a_submit_is_refused() -> None:
    schema = Extraction.model_json_schema()
    assert schema["additionalProperties"] is False
    assert schema["properties"]["chunk_tokens"]["minimum"] == 1
    assert schema["$defs"]["Engine"]["properties"]["tensor_parallel_size"]["minimum"] == 1
    assert schema["$defs"]["Layers"]["required"] == ["ids", "convention"]


def test_code_from_the_model_does_not_run_unless_asked_for() -> None:
    assert Extraction.model_validate(MINIMAL).model.trust_remote_code is False


def test_an_unknown_preset_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="presets: kimi-k25, smollm2-cpu"):
        Extraction.load("smollm")


def test_a_preset_name_is_no_way_out_of_the_presets() -> None:
    with pytest.raises(ConfigError, match="neither a YAML file nor a preset"):
        Extraction.load("../presets/kimi-k25")


def test_an_error_in_a_file_names_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"chunk_tokens": -1}))
    with pytest.raises(ConfigError, match=r"mine\.yaml(.|\n)*chunk_tokens"):
        Extraction.load(str(path))
    path.write_text("a: [")
    with pytest.raises(ConfigError, match=r"mine\.yaml"):
        Extraction.load(str(path))


def test_knobs_replace_the_preset_s() -> None:
    changed = Extraction.model_validate(MINIMAL).overridden(dataset="d.jsonl", limit=5, store="t", chunk_tokens=7)
    assert (str(changed.data.path), changed.data.limit, changed.store, changed.chunk_tokens) == ("d.jsonl", 5, "t", 7)


def test_values_that_decide_states_are_part_of_the_identity() -> None:
    def identity(**engine: Any) -> Identity:
        from tests.extract.test_checks import LLAMA

        wanted = Extraction.model_validate(MINIMAL | {"engine": engine, "layers": {"ids": [2], "convention": "input"}})
        return wanted.identity(LLAMA)

    plain = identity().digest
    assert identity(tensor_parallel_size=8, max_num_batched_tokens=64, max_model_len=99).digest == plain
    assert identity(extra={"attention_backend": "TRITON_MLA"}).digest == plain
    assert identity(quantization="fp8").digest != plain
    assert identity(kv_cache_dtype="fp8").digest != plain
    assert identity(load_format="dummy").digest != plain
    assert identity(extra={"hf_overrides": {"rope_theta": 1.0}}).digest != plain


@pytest.mark.parametrize(("written", "meant"), [("on", "on"), ("off", "off"), ("auto", "auto"), ("'on'", "on")])
def test_on_and_off_mean_what_they_say_in_yaml(written: str, meant: str) -> None:
    engine = Engine.model_validate(yaml.safe_load(f"reuse_prefixes: {written}"))
    assert engine.reuse_prefixes == meant
    assert engine.numerics == {}
