"""From files to the table: what is kept, what is reported, and where it is cut."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

from tasks.samples import SampleTable
from tasks.tokenize.config import Data, Source
from tasks.tokenize.errors import BadRowError, SourceError, TokenizerError
from tasks.tokenize.pipeline import tokenize
from tasks.tokenize.report import TokenizeReport
from tasks.tokenize.rows import ROLES
from tasks.vocabulary import Identity
from tests.tokenize.conftest import CHATML, Maker, chat, checkpoint


class Run:
    """Tokenizes rows or files with the toy checkpoint."""

    def __init__(self, directory: Path, identity: Identity, tmp_path: Path) -> None:
        self.directory, self.identity, self.tmp_path = directory, identity, tmp_path
        self.out = tmp_path / "samples.arrow"

    def file(self, rows: list[Any], name: str = "chats.jsonl") -> Path:
        path = self.tmp_path / name
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in rows]
        data = b"".join(line + b"\n" for line in lines)
        if name.endswith(".gz"):
            data = gzip.compress(data)
        if name.endswith(".zst"):
            data = zstandard.compress(data)
        path.write_bytes(data)
        return path

    def __call__(
        self, rows: list[Any] | Data, max_model_len: int = 513, vocab_size: int = 1000, **data: Any
    ) -> tuple[TokenizeReport, SampleTable]:
        given = rows if isinstance(rows, Data) else Data(path=self.file(rows), **{"processes": 1, **data})
        report = tokenize(given, checkpoint(self.directory, vocab_size), self.identity, max_model_len, self.out)
        return report, SampleTable(self.out)


@pytest.fixture
def run(chatml: Path, identity: Identity, tmp_path: Path) -> Run:
    return Run(chatml, identity, tmp_path)


IDS = {"id": "ids", "input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]}
GOOD = [chat("Hello", "Hi"), {"id": "text", "text": "The quick brown fox"}, IDS]


def test_the_three_kinds_of_rows(run: Run, identity: Identity) -> None:
    report, table = run(GOOD)
    assert (report.read, report.kept, report.skipped) == (3, 3, {})
    assert [table[i].source_id for i in range(3)] == ["c", "text", "ids"]
    assert table[2].input_ids.tolist() == [5, 6, 7]
    assert table[2].loss_mask.tolist() == [False, True, True]
    assert table[1].loss_mask.all()
    assert table.keys == [identity.key(table[i].input_ids) for i in range(3)]
    assert report.tokens == sum(table.num_tokens)
    assert report.methods == {"prefixes": 1, "text": 1, "given": 1}
    assert report.counts == {"turns_user": 1, "turns_assistant": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.ndjson"])
def test_compressed_files_give_the_same_table(run: Run, name: str) -> None:
    _, plain = run(GOOD)
    keys = plain.keys
    _, table = run(Data(path=run.file(GOOD, name), processes=1))
    assert table.keys == keys


def test_frames_of_zstandard_and_members_of_gzip_are_all_read(run: Run) -> None:
    lines = [json.dumps(r).encode() + b"\n" for r in GOOD]
    for name, compress in (("a.jsonl.zst", zstandard.compress), ("a.jsonl.gz", gzip.compress)):
        path = run.tmp_path / name
        path.write_bytes(b"".join(compress(line) for line in lines))
        assert run(Data(path=path))[0].kept == 3


BAD: list[tuple[Any, str, str]] = [
    (b"{not json", "json", "not JSON: Expecting property name enclosed in double quotes at column 2"),
    (b'{"id": ', "json", "not JSON: Expecting value at column 7"),
    (b'{"id": "a}', "json", "not JSON: Unterminated string starting at column 8"),
    (b"[1, 2]", "json", "a JSON object is needed, not a list"),
    (b'{"text": "\xff"}', "json", "not UTF-8"),
    ({"id": 1, "prompt": "x"}, "schema", '"prompt": "x"'),
    ({"messages": []}, "empty", "`messages` has no turn"),
    ({"messages": "hello"}, "type", "`messages` must be a list of turns, not a string ('hello')"),
    ({"messages": ["hello"]}, "type", "`messages[0]` must be an object"),
    ({"messages": [{"speaker": "x"}]}, "schema", "neither `role`/`content` nor `from`/`value`"),
    ({"messages": [{"role": "user", "content": "x"}]}, "no-assistant", "no assistant turn"),
    (
        {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}]},
        "no-assistant",
        "no assistant turn, so nothing to supervise; its roles are: system, user",
    ),
    (
        {"conversations": [{"from": r, "value": "x"} for r in ("human", "alien", "human")]},
        "no-assistant",
        "its roles are: human, alien (what other roles mean is said under `columns.roles`)",
    ),
    (
        {"messages": [*chat("x", "y")["messages"], {"role": "asistant", "content": "z"}]},
        "role",
        "the role 'asistant' is in no known format, perhaps 'assistant', nor in the chat template; known are system,",
    ),
    ({"messages": [{"role": "User", "content": "x"}, *chat("x", "y")["messages"]]}, "role", "perhaps 'user'"),
    (
        {"conversations": [{"from": r, "value": "x"} for r in ("human", "alien", "gpt")]},
        "role",
        "the role 'alien' is in no known format",
    ),
    (
        {"conversations": [{"from": r, "value": "x"} for r in ("human", "wizard", "gpt")]},
        "role",
        "the role 'wizard' is in no known format, nor",
    ),
    (chat("x", "y") | {"id": [1]}, "type", "`id` must be a string or an integer, not a list"),
    ({"messages": [{"role": "user", "content": 5}]}, "type", "must be a string, a list of parts or null, not a number"),
    ({"messages": [{"role": "user", "content": None}]}, "type", "a user turn needs `content`"),
    ({"messages": [{"role": 1, "content": "x"}]}, "type", "`role` must be a string"),
    (chat("x", "y\0"), "characters", "a NUL character at character 1"),
    (chat("x\ud800", "y"), "characters", "half of a surrogate pair (U+D800)"),
    ({"text": ""}, "empty", "`text` is empty"),
    ({"text": 5}, "type", "`text` must be a string"),
    ({"input_ids": []}, "empty", "`input_ids` is empty"),
    ({"input_ids": ["5", "6"]}, "type", "`input_ids[0]` must be an integer, not a string ('5')"),
    ({"input_ids": [True]}, "type", "must be an integer, not a boolean"),
    ({"input_ids": [1.5]}, "type", "must be an integer, not a number"),
    ({"input_ids": [-1]}, "vocabulary", "`input_ids[0]` is -1"),
    ({"input_ids": [2**40]}, "vocabulary", "which is no token id"),
    ({"input_ids": [5, 1000]}, "vocabulary", "token 1000 at position 1 is outside the model's vocabulary of 1000"),
    ({"input_ids": [5, 6], "loss_mask": [1]}, "loss-mask", "1 entries for 2 `input_ids`"),
    ({"input_ids": [5, 6], "loss_mask": [1, 2]}, "loss-mask", "must be 0, 1, true or false"),
    ({"input_ids": [5, 6], "loss_mask": ["1", "1"]}, "loss-mask", "not a string ('1')"),
    ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "unsupervised", "supervises no token"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
        "content-part",
        "only text can be tokenized",
    ),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD, ids=[f"{r[1]}-{i}" for i, r in enumerate(BAD)])
def test_a_bad_row_is_reported_and_the_others_are_kept(run: Run, row: Any, reason: str, detail: str) -> None:
    report, table = run([GOOD[0], row, IDS])
    assert (report.read, report.kept, report.skipped) == (3, 2, {reason: 1})
    (problem,) = report.problems
    assert (problem.file, problem.number, problem.reason) == ("chats.jsonl", 2, reason)
    assert detail in problem.detail
    assert len(table) == 2


def test_a_role_of_the_chat_template_s_own_is_known(run: Run, make_checkpoint: Maker) -> None:
    rows = [{"messages": [*chat("x", "y")["messages"], {"role": "ipython", "content": "z"}]}]
    assert run(rows)[0].skipped == {"role": 1}
    run.directory = make_checkpoint("{%- if messages[0].role == 'ipython' -%}{%- endif -%}" + CHATML)
    assert run(rows)[0].kept == 1


@pytest.mark.parametrize("role", sorted(ROLES))
def test_every_known_role_is_rendered(run: Run, role: str) -> None:
    report, _ = run([{"conversations": [*chat("x", "y")["messages"], {"role": role, "content": "z"}]}])
    assert report.kept == 1


def test_on_error_fail_stops_at_the_first_bad_row_and_leaves_no_table(run: Run) -> None:
    with pytest.raises(BadRowError, match=r"chats\.jsonl:2: not JSON.*on_error: fail"):
        run([GOOD[0], b"{", b"{"], on_error="fail")
    assert not run.out.exists()


def test_the_list_of_problems_is_bounded(run: Run) -> None:
    report, _ = run([b"{"] * 300)
    assert report.skipped == {"json": 300}
    assert len(report.problems) == 100


@pytest.mark.parametrize("rows", [[], [b"{", b"{"]], ids=["no row", "only bad rows"])
def test_nothing_to_keep_is_an_empty_table(run: Run, rows: list[Any]) -> None:
    report, table = run(rows)
    assert (report.kept, report.tokens, len(table), table.keys) == (0, 0, 0, [])


def test_blank_lines_and_a_byte_order_mark_are_no_rows(run: Run) -> None:
    report, _ = run([b"\xef\xbb\xbf" + json.dumps(IDS).encode(), b"", b"  \t", IDS])
    assert (report.read, report.kept) == (2, 2)


def test_a_missing_id_is_made_from_file_and_line(run: Run) -> None:
    rows = [chat("a", "b"), b"", chat("c", "d"), chat("e", "f") | {"id": 17}]
    for row in rows:
        if isinstance(row, dict) and row["id"] == "c":
            del row["id"]
    _, table = run(rows)
    assert [table[i].source_id for i in range(3)] == ["chats.jsonl:1", "chats.jsonl:3", "17"]


def test_duplicates_are_counted_and_keep_their_ids(run: Run) -> None:
    report, table = run([IDS, IDS | {"id": "again"}, IDS | {"id": "third", "loss_mask": [1, 1, 1]}, GOOD[0]])
    assert (report.kept, report.duplicates, report.ids_used_twice) == (4, 2, 0)
    assert table.keys[0] == table.keys[1] == table.keys[2] != table.keys[3]


def test_duplicates_across_sources(run: Run) -> None:
    first, second = run.file([GOOD[0], IDS], "a.jsonl"), run.file([IDS | {"id": "twin"}, GOOD[1]], "b.jsonl")
    data = Data(sources=(Source(path=first), Source(path=second)), processes=1)
    report, table = run(data)
    assert (report.kept, report.duplicates, report.by_source) == (4, 1, [2, 2])
    keys = {table[i].source_id: table[i].key for i in range(4)}
    assert keys["ids"] == keys["twin"]
    assert len(set(keys.values())) == 3


def test_what_a_row_says_cannot_steer_the_terminal(run: Run) -> None:
    report, _ = run([{"messages": [{"role": "\x1b[2J", "content": None}]}])
    assert report.problems[0].detail == "`messages[0]`: a \\x1b[2J turn needs `content`"


def test_an_id_that_stands_for_several_contents_is_named_with_its_places(run: Run) -> None:
    def row(source_id: str, token: int) -> dict[str, Any]:
        return {"id": source_id, "input_ids": [token]}

    first = [row("a", 1), row("b", 2), row("a", 1), row("c", 3)]
    second = [row("a", 4), row("b", 2), row("c", 5), row("a", 6)]
    data = Data(
        sources=(Source(path=run.file(first, "1.jsonl")), Source(path=run.file(second, "2.jsonl"))), processes=1
    )
    report, table = run(data)  # reads a row of each in turn
    assert (report.duplicates, report.ids_used_twice) == (2, 2)
    assert [(s.id, s.first, s.last) for s in report.shared_ids] == [
        ("a", "1.jsonl:1", "2.jsonl:4"),
        ("c", "2.jsonl:3", "1.jsonl:4"),
    ]
    lost = [(table[i].source_id, table[i].input_ids.tolist()) for i in sorted(table.nameless)]
    assert sorted(lost) == [("a", [1]), ("a", [1]), ("a", [4]), ("c", [5])]


def test_another_loss_mask_is_another_content(run: Run) -> None:
    report, table = run([IDS, IDS | {"loss_mask": [1, 1, 1]}, IDS | {"id": "twin"}])
    assert [(s.id, s.first, s.last) for s in report.shared_ids] == [("ids", "chats.jsonl:1", "chats.jsonl:2")]
    assert (report.duplicates, report.ids_used_twice, table.nameless) == (2, 1, {0})


def test_ids_of_one_content_each_are_no_problem(run: Run) -> None:
    report, table = run([IDS, IDS, IDS | {"id": "twin"}])
    assert (report.ids_used_twice, report.shared_ids, table.nameless) == (0, [], frozenset())


def test_limit_counts_rows(run: Run) -> None:
    report, _ = run([IDS, b"{", IDS, IDS], limit=3)
    assert (report.read, report.kept) == (3, 2)


LONG = {"id": "long", "input_ids": list(range(1, 11)), "loss_mask": [0] * 4 + [1] * 6}


def test_truncate_cuts_the_tail_and_the_mask_with_it(run: Run) -> None:
    report, table = run([LONG], max_model_len=8)
    assert (report.kept, report.truncated, report.tokens_cut) == (1, 1, 3)
    assert table[0].input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert table[0].loss_mask.tolist() == [False] * 4 + [True] * 3


def test_a_sample_of_just_the_limit_is_not_cut(run: Run) -> None:
    report, table = run([LONG], max_model_len=11)
    assert (report.truncated, report.tokens_cut, table.num_tokens.tolist()) == (0, 0, [10])


def test_nothing_supervised_after_truncation_is_skipped_and_counted(run: Run) -> None:
    report, table = run([LONG], max_model_len=5)
    assert (report.kept, report.skipped, len(table)) == (0, {"unsupervised": 1}, 0)
    assert "the first 4 of 10 tokens" in report.problems[0].detail


def test_overflow_skip(run: Run) -> None:
    report, _ = run([LONG, IDS], max_model_len=8, overflow="skip")
    assert (report.kept, report.skipped) == (1, {"too-long": 1})


def test_overflow_split_keeps_the_pieces_that_supervise_something(run: Run) -> None:
    report, table = run([LONG, IDS], max_model_len=5, overflow="split")
    assert (report.kept, report.split, report.read, report.truncated) == (3, 1, 2, 0)
    assert [(table[i].source_id, table[i].input_ids.tolist()) for i in range(3)] == [
        ("long#1", [5, 6, 7, 8]),
        ("long#2", [9, 10]),
        ("ids", [5, 6, 7]),
    ]


def test_one_token_samples(run: Run) -> None:
    report, table = run([{"id": "one", "input_ids": [7]}, {"id": "text", "text": "a"}], max_model_len=2)
    assert table.num_tokens.tolist() == [1, 1]
    assert report.supervised_tokens == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.jsonl", "no file"),
        ("nothing-*.jsonl", "no file matches"),
        ("a.csv", "unknown format"),
        (".", "is a directory"),
    ],
)
def test_a_source_that_cannot_be_read_says_so(run: Run, name: str, message: str) -> None:
    (run.tmp_path / "a.csv").touch()
    with pytest.raises(SourceError, match=message):
        run(Data(path=run.tmp_path / name))


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("damage", ["cut", "garbage"])
def test_a_damaged_archive_is_an_error_not_a_short_read(run: Run, name: str, damage: str) -> None:
    rng = np.random.default_rng(0)
    rows = [{"id": i, "input_ids": rng.integers(1, 900, 500).tolist()} for i in range(200)]
    path = run.file(rows, name)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] if damage == "cut" else data[: len(data) // 2] + b"garbage" * 100)
    with pytest.raises(SourceError, match=r"a\.jsonl.* cannot be read after line \d+"):
        run(Data(path=path))
    assert not run.out.exists()


def test_no_chat_template_stops_the_run_whatever_on_error(run: Run, make_checkpoint: Maker) -> None:
    run.directory = make_checkpoint(None)
    assert run([IDS, {"text": "plain"}])[0].kept == 2
    with pytest.raises(TokenizerError, match="no chat template"):
        run([GOOD[0]], on_error="skip")


def test_several_processes_give_the_same_table(run: Run) -> None:
    rows = [chat(f"Question {i}?", f"Answer {i}. " * (i % 7)) | {"id": i} for i in range(700)] + [b"{"]
    report, table = run(rows, processes=1)
    expected = [(s.source_id, s.key, s.loss_mask.tolist()) for s in map(table.__getitem__, range(len(table)))]
    parallel, table = run(rows, processes=2)
    assert [(s.source_id, s.key, s.loss_mask.tolist()) for s in map(table.__getitem__, range(len(table)))] == expected
    parallel.seconds = report.seconds
    assert parallel == report


def test_progress_is_told(run: Run, chatml: Path, identity: Identity) -> None:
    told: list[tuple[int, int]] = []
    data = Data(path=run.file([IDS, b"{", IDS]), processes=1)
    tokenize(data, checkpoint(chatml), identity, 100, run.out, lambda rows, tokens: told.append((rows, tokens)))
    assert told == [(1, 3), (2, 3), (3, 6)]
