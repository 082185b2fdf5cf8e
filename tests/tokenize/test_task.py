"""What a run says of its input: in its log, in its summary, and where nothing of it can be used."""

import logging
from pathlib import Path
from typing import Any

import pytest

from tasks.fleet.summary import FleetSummary
from tasks.report.summary import Summary
from tasks.samples import SampleTable
from tasks.tokenize.config import Data
from tasks.tokenize.errors import NoSamples
from tasks.tokenize.report import TokenizeReport
from tasks.tokenize.task import tokenize_data
from tasks.vocabulary import Identity
from tests.tokenize.conftest import checkpoint

USABLE = '{"id": "a", "input_ids": [1, 2, 3]}'
EMPTY = '{"id": "e", "input_ids": []}'


@pytest.fixture
def run(chatml: Path, identity: Identity, tmp_path: Path) -> Any:
    """Tokenizes lines as a run does."""

    def tokenized(*lines: str, max_model_len: int = 100) -> tuple[SampleTable, TokenizeReport]:
        (tmp_path / "chats.jsonl").write_text("".join(f"{line}\n" for line in lines))
        data = Data(path=tmp_path / "chats.jsonl", processes=1)
        return tokenize_data.fn(data, checkpoint(chatml), identity, max_model_len, tmp_path)

    return tokenized


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "layertap")
    return caplog


def test_skipped_rows_beyond_those_in_the_log_are_counted(run: Any, logged: pytest.LogCaptureFixture) -> None:
    _, report = run(USABLE, *["{"] * 20, *[EMPTY] * 9)
    assert len(logged.messages) == 21
    assert logged.messages[-1] == ("and 9 more input rows are skipped; `layertap tokenize PRESET --skipped` lists all")
    for summary in (Summary("s", report), FleetSummary("s", report)):
        assert dict(summary.lines())["skipped"] == "29 input rows: 20 json, 9 empty"
        assert "29 input rows: 20 json, 9 empty" in summary.markdown()


def test_as_many_as_are_logged_are_no_more(run: Any, logged: pytest.LogCaptureFixture) -> None:
    run(USABLE, *["{"] * 20)
    assert len(logged.messages) == 20


def test_data_without_a_row_is_an_error(run: Any, tmp_path: Path) -> None:
    for lines in ((), ("", "  ")):
        with pytest.raises(NoSamples, match=rf"^{tmp_path}/chats.jsonl has no rows: name data with"):
            run(*lines)


def test_data_without_a_row_that_can_be_used_is_an_error(run: Any) -> None:
    with pytest.raises(
        NoSamples,
        match=r"none of the 3 rows of .*chats\.jsonl can be used \(2 json, 1 empty\); the first: chats\.jsonl:1: not J",
    ):
        run("{", "{", EMPTY)


def test_an_id_with_two_contents_is_told(run: Any, logged: pytest.LogCaptureFixture) -> None:
    other = '{"id": "a", "input_ids": [4]}'
    table, report = run(USABLE, "{", other)
    told = (
        "the id 'a' stands for different tokens or loss masks at chats.jsonl:1 and chats.jsonl:3: it names the "
        "last of them, and the states of the others can be read by key only; give each an id of its own"
    )
    assert logged.messages[1:] == [told]
    assert dict(Summary("s", report).lines())["ids used twice"] == f"1; {told}"
    assert table.nameless == {0}


def test_a_row_of_two_schemas_is_told(run: Any, logged: pytest.LogCaptureFixture) -> None:
    both = '{"input_ids": [1, 2], "text": "a", "messages": []}'
    table, report = run(both, USABLE, both, '{"input_ids": [], "text": "a"}')
    assert [ids.tolist() for ids in (table[0].input_ids, table[2].input_ids)] == [[1, 2], [1, 2]]
    fields = "`messages` and `text` beside `input_ids`"
    assert logged.messages[1:] == [f"not read in 2 input rows: {fields}, which counts; leave out whichever should not"]
    assert dict(Summary("s", report).lines())["not read"] == f"{fields}, in 2 input rows"


def test_what_truncation_takes_is_in_the_summary(run: Any) -> None:
    _, report = run(USABLE, '{"id": "b", "input_ids": [1, 2, 3, 4, 5]}', EMPTY, max_model_len=3)
    assert dict(Summary("s", report).lines())["truncated"] == "2 samples longer than max_model_len - 1, 4 tokens lost"
    _, report = run(USABLE)
    assert "truncated" not in dict(Summary("s", report).lines())


def test_what_the_data_says_is_not_taken_for_markup(run: Any) -> None:
    _, report = run('{"id": "[/x]", "input_ids": [1]}', '{"id": "[/x]", "input_ids": [2]}')
    for summary in (Summary("s", report), FleetSummary("s", report)):
        assert any("[/x]" in str(cell) for column in summary.table().columns for cell in column.cells)
