"""What a person sees of the tokenized data."""

import json
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console
from rich.text import Text

from tasks.report.lengths import draw_lengths
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.tokenize.config import Data
from tasks.tokenize.errors import Problem
from tasks.tokenize.report import TokenizeReport
from tasks.tokenize.show import OTHER, SUPERVISED, conversation, preview, show
from tasks.vocabulary import Identity
from tests.tokenize.conftest import chat, checkpoint, encode, encoder


def sample(source_id: str, ids: list[int], mask: list[int]) -> Sample:
    return Sample(source_id, "k", np.array(ids, np.int32), np.array(mask, bool))


def test_supervised_tokens_are_in_colour(chatml: Path) -> None:
    rows = encoder(chatml)
    encoded = encode(rows, chat("Grüße\x1b[2J [bold]", "Hi \U0001f469‍\U0001f467!"))
    shown = Sample("a", "k", encoded.input_ids.astype(np.int32), encoded.loss_mask)
    panel = conversation(shown, rows.tokenizer.encoder.decode)
    assert isinstance(panel.renderable, Text)
    text = panel.renderable
    spans = [(text.plain[s.start : s.end], s.style) for s in text.spans]
    assert spans == [
        ("<|im_start|>user\nGrüße\\x1b[2J [bold]<|im_end|>\n<|im_start|>assistant\n", OTHER),
        ("Hi \U0001f469‍\U0001f467!<|im_end|>", SUPERVISED),
        ("\n", OTHER),
    ]


def test_the_first_conversations_and_the_statistics_of_all(tmp_path: Path) -> None:
    with SampleTableWriter(tmp_path / "t") as writer:
        writer.add(sample(f"row-{i}", [1] * (i + 1), [1] * (i + 1)) for i in range(100))
    report = TokenizeReport(
        read=103,
        kept=100,
        skipped={"json": 2, "mask": 1},
        tokens=5050,
        supervised_tokens=2525,
        duplicates=3,
        methods={"text": 100},
        by_source=[100, 3],
        problems=[Problem("chats.jsonl", 7, "json", "not JSON")],
        seconds=2.0,
    )
    out = StringIO()
    console = Console(file=out, width=120)
    show(console, SampleTable(tmp_path / "t"), report, lambda ids: "x" * len(ids), 2)
    text = out.getvalue()
    assert "row-0" in text
    assert "row-1" in text
    assert "row-2" not in text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "rows read 103 100 + 3" in lines
    assert "samples 100 3 with the tokens of another" in lines
    assert "skipped: json 2 chats.jsonl:7: not JSON" in lines
    assert "tokens 5,050 2,525 a second" in lines
    assert "supervised 50.0% 100 by text" in lines
    assert "tokens a sample 50 median; 5% below 6, 95% below 95, longest 100" in lines


def test_statistics_of_nothing(tmp_path: Path) -> None:
    with SampleTableWriter(tmp_path / "t"):
        pass
    out = StringIO()
    show(Console(file=out, width=100), SampleTable(tmp_path / "t"), TokenizeReport(), lambda ids: "", 3)
    assert "rows read" in out.getvalue()


@pytest.mark.parametrize("lengths", [[], [1], list(range(1, 3000))])
def test_the_histogram_of_lengths_is_a_picture(tmp_path: Path, lengths: list[int]) -> None:
    draw_lengths(np.array(lengths, np.int32), tmp_path / "lengths.png", max_tokens=2047)
    picture = imread(tmp_path / "lengths.png")
    assert picture.shape[:2] == (468, 910)
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 10


def test_a_preview_shows_what_a_run_would_tokenize(chatml: Path, identity: Identity, tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text(json.dumps(chat("Hello", "Hi!")) + "\n{\n")
    out = StringIO()
    data = Data(path=tmp_path / "c.jsonl", processes=1)
    report = preview(Console(file=out, width=100), data, checkpoint(chatml), identity, 100, 5)
    assert (report.kept, report.skipped) == (1, {"json": 1})
    assert "Hi!<|im_end|>" in out.getvalue()
    assert "skipped: json" in out.getvalue()
