"""Which rows a configuration reads, and in which order."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from tasks.tokenize import sources
from tasks.tokenize.config import Columns, Data, Source
from tasks.tokenize.errors import BadRow, SourceError
from tasks.tokenize.rows import Conversation, decode, parse
from tasks.tokenize.sources import Row, rows

SCHEMA = Draft202012Validator(Data.model_json_schema())
CALL = {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"a": "5", "b": null}'}}
CHATS: list[dict[str, Any]] = [
    {
        "id": "a",
        "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}],
        "tools": None,  # Arrow takes the columns from the first row
    },
    {
        "id": "b",
        "messages": [
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "{}", "tool_call_id": "c0"},
            {"role": "assistant", "content": "y", "reasoning_content": "z"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    },
]


def write(path: Path, values: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(values), path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(v) + "\n" for v in values))
    else:
        datasets.Dataset.from_list(values).save_to_disk(path)
    return path


def source(path: Path, **options: Any) -> Source:
    return Source(dataset=str(path), **options) if not path.suffix else Source(path=path, **options)


def read(tmp_path: Path, data: Data) -> list[Row]:
    return list(rows(data, tmp_path))


def numbers(tmp_path: Path, data: Data) -> list[tuple[int, int]]:
    return [(r.source, r.number) for r in read(tmp_path, data)]


def items(tmp_path: Path, data: Data) -> list[Any]:
    return [
        parse(decode(r.value) if isinstance(r.value, bytes) else r.value or {}, Columns(), "made-up")
        for r in read(tmp_path, data)
    ]


@pytest.mark.parametrize("name", ["c.parquet", "saved"])
def test_tables_give_the_same_conversations_as_jsonl(tmp_path: Path, name: str) -> None:
    plain = items(tmp_path, Data(path=write(tmp_path / "c.jsonl", CHATS)))
    assert isinstance(plain[1], Conversation)
    assert plain[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": "5", "b": None}
    assert items(tmp_path, Data(sources=(source(write(tmp_path / name, CHATS)),))) == plain


def test_columns_of_json_text_are_unpacked(tmp_path: Path) -> None:
    packed = [c | {"messages": json.dumps(c["messages"]), "tools": json.dumps(c.get("tools"))} for c in CHATS]
    plain = items(tmp_path, Data(path=write(tmp_path / "c.jsonl", CHATS)))
    assert items(tmp_path, Data(path=write(tmp_path / "c.parquet", packed))) == plain


def test_a_split_of_a_saved_data_set(tmp_path: Path) -> None:
    splits = datasets.DatasetDict(
        train=datasets.Dataset.from_list(CHATS[:1]), test=datasets.Dataset.from_list(CHATS[1:])
    )
    splits.save_to_disk(tmp_path / "saved")
    test = items(tmp_path, Data(sources=(Source(dataset=str(tmp_path / "saved"), split="test"),)))
    assert [i.id for i in test] == ["b"]
    with pytest.raises(SourceError, match="no split 'validation'; it has train, test"):
        items(tmp_path, Data(sources=(Source(dataset=str(tmp_path / "saved"), split="validation"),)))


def test_revision_and_split_reach_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load(*args: Any, **kwargs: Any) -> datasets.Dataset:
        asked.append((args, kwargs))
        return datasets.Dataset.from_list(CHATS)

    monkeypatch.setattr(datasets, "load_dataset", load)
    data = Data(sources=(Source(dataset="org/chats", config="en", revision="abc123", split="test[:1%]"),))
    assert [r.file for r in read(tmp_path, data)] == ["org/chats/en[test[:1%]]"] * 2
    assert asked == [(("org/chats", "en"), {"revision": "abc123", "split": "test[:1%]"})]


def test_a_data_set_that_cannot_be_loaded_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*args: Any, **kwargs: Any) -> None:
        raise datasets.exceptions.DatasetNotFoundError("not there")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(SourceError, match=r"org/chats .split train, revision newest. cannot be loaded: .*not there"):
        read(tmp_path, Data(sources=(Source(dataset="org/chats"),)))


def test_a_damaged_parquet_file_says_so(tmp_path: Path) -> None:
    (tmp_path / "c.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(SourceError, match=r"c\.parquet cannot be read after row 0"):
        read(tmp_path, Data(path=tmp_path / "c.parquet"))


def test_patterns_read_files_by_name(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.parquet"):
        write(tmp_path / name, CHATS)
    found = [(r.file, r.number) for r in read(tmp_path, Data(path=tmp_path / "*.jsonl"))]
    assert found == [("a.jsonl", 1), ("a.jsonl", 2), ("b.jsonl", 1), ("b.jsonl", 2)]


def test_a_tilde_is_the_users_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "c.jsonl", CHATS)
    write(tmp_path / "saved", CHATS)
    data = Data(sources=(Source(path=Path("~/c.jsonl")), Source(dataset="~/saved")))
    assert [r.file for r in read(tmp_path, data)] == ["c.jsonl", "~/saved[train]"] * 2


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        paths.append(write(tmp_path / name / "c.jsonl", CHATS[:1]))
    found = read(tmp_path, Data(sources=tuple(Source(path=p) for p in paths)))
    assert [r.file for r in found] == [str(p) for p in paths]
    assert [r.file for r in read(tmp_path, Data(path=paths[0]))] == ["c.jsonl"]


def test_a_json_array_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "c.json").write_text(json.dumps(CHATS))
    with pytest.raises(SourceError, match=r"c\.json is one JSON array: write one object a line"):
        read(tmp_path, Data(path=tmp_path / "c.json"))


def test_weights_limits_and_order(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", [{"id": i} for i in range(9)])
    two = (Source(path=path, weight=2), Source(path=path, limit=4))
    drawn = numbers(tmp_path, Data(sources=two))
    assert drawn[:6] == [(0, 1), (0, 2), (1, 1), (0, 3), (0, 4), (1, 2)]
    assert sorted(drawn) == [(0, n) for n in range(1, 10)] + [(1, n) for n in range(1, 5)]
    assert numbers(tmp_path, Data(sources=two, limit=5)) == drawn[:5]


def test_shuffle_depends_on_the_seed_alone_and_comes_before_limits(tmp_path: Path) -> None:
    values = [{"id": i} for i in range(100)]
    files = [write(tmp_path / n, values) for n in ("c.jsonl", "c.parquet", "saved")]
    orders = [numbers(tmp_path, Data(sources=(source(f),), shuffle_seed=7)) for f in files]
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] != sorted(orders[0]) == [(0, n) for n in range(1, 101)]
    assert numbers(tmp_path, Data(path=files[0], shuffle_seed=7, limit=10)) == orders[0][:10]
    assert numbers(tmp_path, Data(path=files[0], shuffle_seed=8)) != orders[0]


def test_a_line_without_end_is_reported_and_read_past(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "MAX_LINE_BYTES", 40)
    path = tmp_path / "c.jsonl"
    path.write_bytes(b'{"id": 1}\n' + b"x" * 41 + b"\n" + b"y" * 4000 + b"\n" + b'{"id": 2}\n')
    assert [(r.number, r.value) for r in read(tmp_path, Data(path=path))] == [
        (1, b'{"id": 1}\n'),
        (2, None),
        (3, None),
        (4, b'{"id": 2}\n'),
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "either `path` or `sources`"),
        ({"path": "a.jsonl", "sources": [{"path": "b.jsonl"}]}, "either `path` or `sources`"),
        ({"sources": [{}]}, "either `path` or `dataset`"),
        ({"sources": [{"path": "a.jsonl", "dataset": "b"}]}, "either `path` or `dataset`"),
        ({"sources": [{"path": "a.jsonl", "revision": "main"}]}, "belong to a `dataset`"),
        ({"sources": [{"path": "a.jsonl", "weight": 0}]}, "greater than 0"),
        ({"path": "a.jsonl", "shufle_seed": 1}, "Extra inputs are not permitted"),
        ({"path": "a.jsonl", "overflow": "drop"}, "'truncate', 'skip' or 'split'"),
        ({"path": "a.jsonl", "limit": 0}, "greater than or equal to 1"),
        ({"path": "a.jsonl", "template_date": "today"}, "should match pattern"),
    ],
)
def test_a_wrong_configuration_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Data.model_validate(values)
    if "belong to" not in message:
        assert not SCHEMA.is_valid(values)


@pytest.mark.parametrize(
    "values",
    [
        {"path": "a.jsonl"},
        {"path": "a.jsonl", "sources": [], "limit": None, "shuffle_seed": 3},
        {"path": None, "sources": [{"path": "a.jsonl", "dataset": None}, {"dataset": "b", "split": "test"}]},
        {"sources": [{"path": "a.jsonl", "weight": 0.5, "columns": {"roles": {"bot": "assistant"}}}]},
    ],
)
def test_a_right_configuration_fits_the_schema(values: dict[str, Any]) -> None:
    data = Data.model_validate(values)
    SCHEMA.validate(values)
    assert Data.model_validate(data.model_dump(mode="json")) == data
    SCHEMA.validate(data.model_dump(mode="json", exclude_defaults=True))


SHAREGPT = {
    "id": "s",
    "conversations": [
        {"from": "system", "value": "be kind"},
        {"from": "human", "value": "x"},
        {"from": "function_call", "value": '{"name": "f", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "{}"},
        {"from": "gpt", "value": "y"},
    ],
}


def test_sharegpt_is_recognised() -> None:
    item = parse(SHAREGPT, Columns(), "x")
    assert isinstance(item, Conversation)
    assert item.messages == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "{}"},
        {"role": "assistant", "content": "y"},
    ]


def test_a_mapping_names_other_fields_and_speakers() -> None:
    columns = Columns(
        id="uid", messages="dialog", role="who", content="said", roles={"customer": "user", "us": "assistant"}
    )
    row = {"uid": 3, "dialog": [{"who": "customer", "said": "x"}, {"who": "us", "said": "y"}], "text": "z"}
    item = parse(row, columns, "x")
    assert item == Conversation("3", [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])
    with pytest.raises(BadRow, match=r'The row: \{"uid": 3'):
        parse(row | {"dialog": None, "text": None}, columns, "x")


def test_parts_reasoning_and_null_fields_come_into_one_form() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "user", "content": parts, "name": None, "tool_calls": None},
        {"role": "assistant", "content": [{"type": "text", "text": "one"}], "reasoning": "why", "tool_calls": []},
    ]
    item = parse({"messages": messages}, Columns(), "x")
    assert isinstance(item, Conversation)
    assert item.messages == [
        {"role": "user", "content": parts},
        {"role": "assistant", "content": "one", "reasoning_content": "why"},
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"function": {"arguments": "{}"}}, "has no function name"),
        ({"function": {"name": "f", "arguments": "{a"}}, "`arguments` are not JSON"),
        ({"function": {"name": "f", "arguments": "[1]"}}, "`arguments` must be a JSON object, not a list"),
        ("f()", "must be an object, not a string"),
    ],
)
def test_a_wrong_tool_call_is_refused(call: Any, message: str) -> None:
    with pytest.raises(BadRow, match=message) as caught:
        parse({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}, Columns(), "x")
    assert caught.value.reason == "tool-call"


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments_has_empty_ones(arguments: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    item = parse({"messages": [{"role": "assistant", "content": "", "tool_calls": [call]}]}, Columns(), "x")
    assert isinstance(item, Conversation)
    assert item.messages[0]["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
