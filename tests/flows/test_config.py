"""Configuration: presets load, and what is wrong is refused with the place and the reason."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.utilities.callables import parameter_schema
from pydantic import ValidationError

from flows.config import PRESETS, ConfigError, Extraction
from flows.extract import extract
from flows.fleet import extract_fleet
from flows.ray_fleet import extract_ray
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


def test_a_store_is_not_told_the_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/mine")
    sources = [{"path": "/home/mine/a.jsonl"}, {"dataset": "/home/mine/b"}, {"dataset": "org/c"}, {"path": "/data/d"}]
    values = MINIMAL | {"model": {"path": "/home/mine/model"}, "data": {"sources": sources}}
    kept = Extraction.model_validate(values).provenance()
    assert kept["model"]["path"] == "~/model"
    assert [source["path"] or source["dataset"] for source in kept["data"]["sources"]] == [
        "~/a.jsonl",
        "~/b",
        "org/c",
        "/data/d",
    ]
    assert "/home/mine" not in str(kept)


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


ALL = "model, layers, dtype, data, chunk_tokens, store, stored_as, engine, audit"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"layers": [1, 2]},
            "layers: a bare list is refused, since the same numbers mean different layers in different tools; write "
            "`layers: {ids: [1, 2], convention: output}` or `convention: input`",
        ),
        (
            {"layers": {"ids": "all", "convention": "output"}},
            "layers.ids: write a list of layer ids, such as [2, 14, 26, 29], not 'all'",
        ),
        ({"layers": {"ids": [2.5], "convention": "output"}}, "layers.ids[0] must be a whole number, not 2.5"),
        ({"layers": {"ids": [], "convention": "output"}}, "layers.ids must not be empty"),
        ({"layers": {"ids": [1], "convention": "out"}}, "layers.convention must be 'input' or 'output', not \"out\""),
        ({"stores": "t"}, f"there is no setting stores: perhaps `store`; known are {ALL}"),
        ({"unknown": 1}, f"there is no setting unknown: known are {ALL}"),
        ({"max_model_len": 9}, f"there is no setting max_model_len: it belongs under `engine`; known are {ALL}"),
        (
            {"data": {"sources": [{"path": "a", "wieght": 2}]}},
            "there is no setting data.sources[0].wieght: perhaps `weight`; known are path, dataset, config, revision, "
            "split, columns, weight, limit",
        ),
        (
            {"engine": {"pipeline_parallel_size": 2}},
            "engine.pipeline_parallel_size cannot be set: ranks before the last return no auxiliary states; use tensor "
            "parallelism",
        ),
        ({"engine": {"pipeline_parallel_size": 1}}, "engine.pipeline_parallel_size cannot be set; remove it"),
        ({"data": {}}, "data needs either `path` or `sources`"),
        ({"data": {"path": "a", "limit": 0}}, "data.limit must be at least 1, not 0"),
        ({"store": ""}, "store must not be empty"),
        ({"chunk_tokens": "many"}, 'chunk_tokens must be a whole number, not "many"'),
        ({"engine": {"gpu_memory_utilization": 1.5}}, "engine.gpu_memory_utilization must be at most 1.0, not 1.5"),
        ({"audit": {"probe": "maybe"}}, 'audit.probe must be true or false, not "maybe"'),
    ],
)
def test_what_is_refused_is_said_in_one_sentence(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | change))
    with pytest.raises(ConfigError) as refused:
        Extraction.load(str(path))
    assert str(refused.value) == f"{path}: {said}"


def test_an_unknown_argument_of_the_engine_may_be_vllm_s(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(MINIMAL | {"engine": {"tensor_paralel_size": 8}}))
    with pytest.raises(
        ConfigError, match=r"perhaps `tensor_parallel_size`; known are .*`engine: \{extra: \{tensor_para"
    ):
        Extraction.load(str(path))


def test_all_that_is_wrong_is_said_a_line_each(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("model: {path: m}\nstore: s\nchunk_tokens: 0\n")
    with pytest.raises(ConfigError) as refused:
        Extraction.load(str(path))
    assert str(refused.value).splitlines() == [
        f"{path}: layers is missing; it holds ids, convention",
        "data is missing; it holds path, sources, on_error, limit, shuffle_seed, overflow, special_tokens, "
        "template_kwargs, template_date, processes",
        "chunk_tokens must be at least 1, not 0",
    ]


def test_a_knob_that_is_refused_is_a_sentence_too() -> None:
    with pytest.raises(ConfigError, match=r"^store must not be empty$"):
        Extraction.model_validate(MINIMAL).overridden(store="")


@pytest.mark.parametrize("of", [extract, extract_fleet, extract_ray], ids=lambda flow: flow.name)
def test_the_knobs_of_a_flow_carry_their_bounds(of: Any) -> None:
    properties = parameter_schema(of.fn).model_dump()["properties"]
    bounds = {name: properties[name]["anyOf"][0]["minimum"] for name in ("limit", "chunk_tokens", "shuffle_seed")}
    assert bounds == {"limit": 1, "chunk_tokens": 1, "shuffle_seed": 0}


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
