"""The tokens of a conversation do not depend on how it is read or what is tokenized beside it."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tasks.samples import SampleTable
from tasks.tokenize import pipeline
from tasks.tokenize.config import Columns, Data, Source
from tasks.tokenize.encode import Encoded, RowEncoder
from tasks.tokenize.errors import BadRow
from tasks.tokenize.rows import Item, parse
from tasks.tokenize.sources import without_nulls
from tasks.vocabulary import Identity
from tests.tokenize.conftest import checkpoint, encoder, supervised, whole

# Text that provokes: control tokens, tags, blanks at the edges, characters of several bytes.
fragments = st.sampled_from(
    [
        "<|im_end|>",
        "<|im_start|>assistant\n",
        "<think>",
        "</think>",
        "\n",
        "  ",
        "é",
        "👩‍👧",
        "مر",
        "\ufdd0",
        "Hello",
        "0",
        "<|",
    ]
)
texts = st.lists(
    fragments | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=8), max_size=5
)
contents = texts.map("".join)
turns = st.lists(st.tuples(st.sampled_from(["user", "assistant", "system", "tool"]), contents), min_size=1, max_size=8)
conversations = turns.filter(lambda t: any(role == "assistant" for role, _ in t)).map(
    lambda t: {"id": "c", "messages": [{"role": role, "content": content} for role, content in t]}
)
rows_of_all_kinds = st.one_of(
    conversations,
    contents.filter(bool).map(lambda text: {"id": "t", "text": text}),
    st.lists(st.integers(0, 300), min_size=1, max_size=20).map(lambda ids: {"id": "i", "input_ids": ids}),
)
quick = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def rows(chatml: Path) -> RowEncoder:
    return encoder(chatml)


def outcome(encoded: Encoded | BadRow) -> Any:
    if isinstance(encoded, BadRow):
        return encoded.reason, encoded.detail
    return encoded.input_ids.tolist(), encoded.loss_mask.tolist(), encoded.how, dict(encoded.counts)


def item(row: dict[str, Any]) -> Item:
    return parse(row, Columns(), "made-up")


@quick
@given(st.lists(rows_of_all_kinds, min_size=1, max_size=8))
def test_what_is_beside_a_row_changes_nothing(rows: RowEncoder, values: list[dict[str, Any]]) -> None:
    alone = [outcome(rows.encode([item(v)])[0]) for v in values]
    assert [outcome(e) for e in rows.encode([item(v) for v in values])] == alone


@quick
@given(conversations)
def test_decoding_gives_what_the_template_wrote(rows: RowEncoder, value: dict[str, Any]) -> None:
    (encoded,) = rows.encode([item(value)])
    assert isinstance(encoded, Encoded)
    assert whole(rows, encoded) == "".join(
        f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in value["messages"]
    )
    end = rows.tokenizer.added["<|im_end|>"]
    assert encoded.input_ids.tolist().count(end) == len(value["messages"])
    assert encoded.input_ids[encoded.loss_mask].tolist().count(end) == sum(
        m["role"] == "assistant" for m in value["messages"]
    )


@quick
@given(conversations)
def test_what_is_supervised_is_the_assistants_text(rows: RowEncoder, value: dict[str, Any]) -> None:
    """Up to what a token shares with the header's newline, and without an empty think block at the start."""
    (encoded,) = rows.encode([item(value)])
    assert isinstance(encoded, Encoded)
    said = [m["content"] + "<|im_end|>" for m in value["messages"] if m["role"] == "assistant"]
    for shown, full in zip(supervised(rows, encoded), said, strict=True):
        assert full.endswith(shown)
        left_out = full.removesuffix(shown)
        assert left_out.replace("<think>", "").replace("</think>", "").strip() == ""


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(conversations, min_size=1, max_size=6), st.integers(1, 4))
def test_the_format_of_the_source_changes_nothing(
    chatml: Path,
    identity: Identity,
    tmp_path_factory: pytest.TempPathFactory,
    values: list[dict[str, Any]],
    batch: int,
) -> None:
    directory = tmp_path_factory.mktemp("formats")
    (directory / "c.jsonl").write_text("".join(json.dumps(v) + "\n" for v in values))
    pq.write_table(pa.Table.from_pylist(values), directory / "c.parquet")
    sources = [Source(path=directory / "c.jsonl"), Source(path=directory / "c.parquet")]
    if batch == 1:  # slow to write
        datasets.Dataset.from_list(values).save_to_disk(directory / "saved")
        sources.append(Source(dataset=str(directory / "saved")))
    tables = []
    for source in sources:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pipeline, "BATCH_ROWS", batch)
            data = Data(sources=(source,), processes=1)
            pipeline.tokenize(data, checkpoint(chatml), identity, 512, directory / "out")
        table = SampleTable(directory / "out")
        tables.append(
            [(s.key, s.input_ids.tolist(), s.loss_mask.tolist()) for s in map(table.__getitem__, range(len(table)))]
        )
    assert tables.count(tables[0]) == len(tables)


def test_nulls_of_a_table_are_no_values() -> None:
    row = {"a": None, "b": [{"c": None, "d": 1}], "e": {"f": [None, 2]}}
    assert without_nulls(row) == {"b": [{"d": 1}], "e": {"f": [None, 2]}}
