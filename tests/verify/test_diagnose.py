"""Each known fault is recognised by the shapes it leaves, with its arithmetic; nothing is made up for others."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from typer.testing import CliRunner

from flows.cli import app
from tasks.verify.diagnose import Expected, Shape, describe, diagnose, explain, matches, parse_shape
from tasks.verify.shapes import UnreadableFile, read_shapes

L, H, TP = 4, 7168, 8
LENGTHS = (512, 259)
KIMI = Expected(L, H, LENGTHS, TP, num_layers=61)


@pytest.mark.parametrize(
    ("shapes", "name", "arithmetic"),
    [
        ([(512,)] * 771, "token axis", "771 = 512 + 259 tensors"),
        ([(H,)] * 771, "token axis", "771 = 512 + 259"),
        ([(512, 896)] * 4, "one rank's shard", "896 = 7168 / 8"),
        ([(771, 896)], "one rank's shard", "896 = 7168 / 8"),
        ([(64, H)], "sequence-parallel rows", "64 = 512 / 8"),
        ([(33, H)], "sequence-parallel rows", "33 = 259 / 8, rounded up"),
        ([(4 * 512, H)], "layers along tokens", "2048 = 4 x 512"),
        ([(3 * 259, H)], "layers along tokens", "777 = 3 x 259"),
        ([(512, 4 * H)], "layers along hidden", "28672 = 4 x 7168"),
        ([(512, 3 * H)], "layers along hidden", "21504 = 3 x 7168"),
        ([(771, H)], "batch not split", "771 = 512 + 259 rows"),
        ([(4, 771, H)], "batch not split", "771 = 512 + 259 rows"),
        ([(480, H)] * 4, "cached prefix", "480 = 512 - 32"),
        ([(4, 500, H)], "cached prefix", "500 = 512 - 12"),
        ([(513, H)], "decoded row", "513 = 512 + 1"),
        ([(264, H)], "padding rows", "264 = 259 rounded up to a multiple of 8"),
        ([(H, 512)], "transposed", "[7168, 512] = [H, T]"),
        ([(512, L, H)], "axes swapped", "[512, 4, 7168] = [T, L, H]"),
        ([(2, 512, H)], "padded batch", "2 samples, longest 512"),
        ([(1, 512, H)], "single layer", "one layer instead of 4"),
        ([(3, 512, H)], "layer missing", "3 = 4 - 1"),
        ([(512, H)] * 3, "layer missing", "3 = 4 - 1"),
        ([(512, H)] * 5, "layer too many", "5 = 4 + 1"),
        ([(62, 512, H)], "all layers", "62 = 61 + 1"),
        ([(512, H)] * 62, "all layers", "62 = 61 + 1"),
        ([(256, H), (256, H)], "prefill chunk", "add up to 512"),
        ([(256, H), (3, H)], "prefill chunk", "add up to 259"),
        ([(4, 512)], "hidden axis lost", "512 values for 512 tokens"),
        ([(512,)] * 4, "hidden axis lost", "512 values for 512 tokens"),
        ([(H,)], "pooled", "one row of 7168 = H"),
    ],
)
def test_each_fault_is_recognised_first(shapes: list[Shape], name: str, arithmetic: str) -> None:
    first, *_ = diagnose(shapes, KIMI)
    assert first.name == name
    assert arithmetic in first.text


@pytest.mark.parametrize(
    "shapes",
    [[(300, 17)], [(5, 5, 5, 5)], [(17,)], [()], [(4096, H)], [(512, H - 1)], [(L, 512, 2 * H)], [(0, H)]],
)
def test_what_nothing_explains_is_not_explained(shapes: list[Shape]) -> None:
    assert diagnose(shapes, KIMI) == []
    assert explain(shapes, KIMI) == "no known fault gives these shapes"


@pytest.mark.parametrize("shapes", [[(L, 512, H)], [(L, 512, H), (L, 259, H)], [(512, H)] * 4, [(259, H)] * 8])
def test_right_shapes_are_right(shapes: list[Shape]) -> None:
    assert matches(shapes, KIMI)
    assert explain(shapes, KIMI) == "the shapes are as they should be"


sizes = st.integers(2, 8)


@given(sizes, st.sampled_from([2, 4, 8]), st.lists(st.integers(300, 3000), min_size=2, max_size=4, unique=True))
def test_the_equation_holds_whatever_the_sizes_are(depths: int, tp: int, lengths: list[int]) -> None:
    hidden = 7168
    expected = Expected(depths, hidden, tuple(lengths), tp)
    ways: dict[str, Callable[[], list[Shape]]] = {
        "token axis": lambda: [(lengths[0],)] * sum(lengths),
        "one rank's shard": lambda: [(lengths[0], hidden // tp)] * depths,
        "layers along hidden": lambda: [(lengths[1], depths * hidden)],
        "batch not split": lambda: [(sum(lengths), hidden)],
        "transposed": lambda: [(hidden, lengths[0])],
    }
    for name, shapes in ways.items():
        assert name in {h.name for h in diagnose(shapes(), expected)}


def test_what_explains_more_tensors_comes_first() -> None:
    hypotheses = diagnose([(512, 896)] * 5 + [(513, H)], KIMI)
    assert [h.name for h in hypotheses] == ["one rank's shard", "decoded row"]
    assert [h.explains for h in hypotheses] == [5, 1]
    assert explain([(512, 896)] * 5 + [(513, H)], KIMI).startswith("1. one rank's shard")


def test_shapes_from_the_command_line() -> None:
    assert parse_shape("771*[512]") == [(512,)] * 771
    assert parse_shape("512x7168") == parse_shape("[512, 7168]") == parse_shape("512,7168") == [(512, 7168)]
    for wrong in ("", "a", "512x", "3*", "file.bin"):
        with pytest.raises(ValueError, match="no file and no shape"):
            parse_shape(wrong)
    assert describe([(512,)] * 771 + [(3, 4)]) == "771 tensors of [512], 1 tensor of [3, 4]"


class Payload:
    """What a pickle could run."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("ran"),)  # type: ignore[return-value]


def test_files_are_read_without_running_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    states = {"hidden_states": [torch.zeros(512)] * 3, "input_ids": torch.zeros(7, dtype=torch.int64)}
    torch.save(states, "sample.pt")
    found = read_shapes(Path("sample.pt"))
    assert (found.shapes, found.num_tokens) == (((512,),) * 3, 7)
    save_file(
        {"hidden_states": torch.zeros(5, 4, 8, dtype=torch.bfloat16), "token_ids": torch.arange(5)}, "s.safetensors"
    )
    found = read_shapes(Path("s.safetensors"))
    assert (found.shapes, found.num_tokens) == (((5, 4, 8),), 5)

    torch.save({"x": Payload()}, "evil.pt")
    with pytest.raises(UnreadableFile, match="code in it is not run"):
        read_shapes(Path("evil.pt"))
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.pt", None, "does not exist"),
        ("none.safetensors", None, "does not exist"),
        ("torn.safetensors", b"abc", "cannot be read"),
        ("torn.pt", b"abc", "torn.pt"),
        ("text.txt", b"abc", "known are"),
        ("empty.pt", "empty", "no floating-point tensor"),
    ],
)
def test_what_cannot_be_read_is_said(tmp_path: Path, name: str, content: bytes | str | None, message: str) -> None:
    path = tmp_path / name
    if content == "empty":
        torch.save({"input_ids": torch.arange(3)}, path)
    elif isinstance(content, bytes):
        path.write_bytes(content)
    with pytest.raises(UnreadableFile, match=message):
        read_shapes(path)


def test_the_doctor_s_command_line(tmp_path: Path) -> None:
    run = CliRunner().invoke
    options = ["--layers", "4", "--hidden", "7168", "--lengths", "512,259", "--tp", "8"]
    result = run(app, ["doctor", "771*[512]", *options])
    assert result.exit_code == 0
    assert "771 tensors of [512]" in result.output
    assert "the batch was walked along its token axis: 771 = 512 + 259" in result.output
    assert "the hidden axis of 7168 is gone" in result.output

    torch.save({"hidden_states": torch.zeros(4, 96, 8), "input_ids": torch.arange(112)}, tmp_path / "a.pt")
    result = run(app, ["doctor", str(tmp_path / "a.pt"), "--layers", "4", "--hidden", "8"])
    assert "rows of a cached prefix are missing: 96 = 112 - 16" in result.output
    assert run(app, ["doctor", "nonsense"]).exit_code == 1
    assert run(app, ["doctor", "3x4", "--lengths", "many"]).exit_code == 1
