"""What probably happened when hidden states have the wrong shape, with the arithmetic.

Pure functions over shapes: each rule knows one way in which captures go wrong and the equation that it leaves
behind. What no rule explains is not explained.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

Shape = tuple[int, ...]

_BLOCK = 16  # tokens of a KV-cache block: prefix caches leave out whole blocks
_ROUND = (8, 16, 32, 64, 128, 256, 512)  # what batches are padded to


@dataclass(frozen=True)
class Expected:
    """What the states should have been; what is not known is None or empty."""

    num_depths: int | None = None
    """L"""
    hidden_size: int | None = None
    """H"""
    lengths: tuple[int, ...] = ()
    """T of each sample that the tensors may belong to."""
    tensor_parallel_size: int = 1
    num_layers: int | None = None
    """Decoder layers of the model."""


@dataclass(frozen=True)
class Hypothesis:
    """One explanation."""

    name: str
    text: str
    """What happened, and the arithmetic."""
    explains: int
    """How many of the tensors it explains."""
    priority: int
    """Smaller is more specific."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class _Tensor:
    """A shape read as [layers,] rows, columns."""

    shape: Shape
    leading: int | None
    rows: int
    columns: int


_Found = tuple[str, str, int]  # name, text, priority
_Rule = Callable[[_Tensor, Expected], Iterator[_Found]]


def diagnose(shapes: Sequence[Shape], expected: Expected) -> list[Hypothesis]:
    """Explain shapes, the most probable first; empty if nothing that is known gives them, or if they are right.

    Args:
        shapes: of all tensors that were found, in one file or in several.
        expected: what they should have been.
    """
    if not shapes or matches(shapes, expected):
        return []
    found: dict[str, Hypothesis] = {}
    for name, text, priority in _of_all(shapes, expected):
        found[name] = Hypothesis(name, text, len(shapes), priority)
    for shape, count in Counter(shapes).items():
        for name, text, priority in _of_one(shape, expected):
            before = found.get(name)
            if before is None:
                found[name] = Hypothesis(name, text, count, priority)
            elif text not in before.text:
                merged = f"{before.text}; {text}"
                found[name] = Hypothesis(name, merged, before.explains + count, min(priority, before.priority))
    return sorted(found.values(), key=lambda h: (-h.explains, h.priority))


def matches(shapes: Sequence[Shape], expected: Expected) -> bool:
    """Whether the shapes are as they should be: [L, T, H] a sample, or L times [T, H]."""
    L, H, lengths = expected.num_depths, expected.hidden_size, expected.lengths
    if H is None or not all(len(s) in (2, 3) and s[-1] == H and (not lengths or s[-2] in lengths) for s in shapes):
        return False
    if all(len(s) == 3 for s in shapes):
        return L is None or all(s[0] == L for s in shapes)
    return all(len(s) == 2 for s in shapes) and (L is None or all(n % L == 0 for n in Counter(shapes).values()))


def explain(shapes: Sequence[Shape], expected: Expected) -> str:
    """The diagnosis as text: one line a hypothesis, or that there is none."""
    hypotheses = diagnose(shapes, expected)
    if not hypotheses:
        right = bool(shapes) and matches(shapes, expected)
        return "the shapes are as they should be" if right else "no known fault gives these shapes"
    return "\n".join(f"{i}. {h}" if len(hypotheses) > 1 else str(h) for i, h in enumerate(hypotheses, 1))


def describe(shapes: Sequence[Shape]) -> str:
    """Shapes in short: ``771 tensors of [512]``."""
    parts = [f"{n} tensor{'s' if n > 1 else ''} of {list(s)}" for s, n in Counter(shapes).most_common(5)]
    more = len(Counter(shapes)) - len(parts)
    return ", ".join(parts) + (f" and {more} other shapes" if more > 0 else "")


def parse_shape(text: str) -> list[Shape]:
    """Read a shape from the command line: ``512x7168``, ``[512,7168]``, or with a count ``771*[512]``.

    Raises:
        ValueError: it is none of these.
    """
    match = re.fullmatch(r"(?:(\d+)\s*\*\s*)?\[?\s*(\d+(?:\s*[x,]\s*\d+)*)\s*,?\s*\]?", text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no file and no shape; write 512x7168, [512,7168] or 771*[512]")
    shape = tuple(int(n) for n in re.split(r"\s*[x,]\s*", match[2]))
    return [shape] * int(match[1] or 1)


def _of_all(shapes: Sequence[Shape], e: Expected) -> Iterator[_Found]:
    """Rules about the number of tensors."""
    count, kinds = len(shapes), set(shapes)
    total, sums = sum(e.lengths), " + ".join(str(n) for n in e.lengths)
    if e.lengths and count == total > len(e.lengths) and all(len(s) == 1 for s in kinds):
        widths = sorted({s[0] for s in kinds})
        hidden = "" if e.hidden_size is None else f" of {e.hidden_size}"
        lost = "" if widths == [e.hidden_size] else f", and the hidden axis{hidden} is gone: each has {widths}"
        equation = f"{count} = {sums}" if len(e.lengths) > 1 else f"{count} tokens"
        yield "token axis", f"the batch was walked along its token axis: {equation} tensors, one a token{lost}", 0
        return
    if e.hidden_size is None or not all(len(s) == 2 and s[1] == e.hidden_size for s in kinds):
        return
    rows = [s[0] for s in shapes]
    for length in e.lengths:
        in_depths = sum(rows) % length == 0 and sum(rows) // length == (e.num_depths or 1)
        if count > 1 and (sum(rows) == length or (in_depths and max(rows) < length)):
            yield (
                "prefill chunk",
                f"one capture per prefill chunk: the rows {_some(rows)} add up to {sum(rows)} = "
                + (f"{length}" if sum(rows) == length else f"{e.num_depths} layers x {length}"),
                1,
            )
    if e.num_depths is not None and set(rows) <= set(e.lengths) and len(set(rows)) == 1:
        if e.num_layers is not None and count == e.num_layers + 1 and count != e.num_depths:
            yield (
                "all layers",
                f"every layer was captured: {count} = {e.num_layers} + 1, asked for {e.num_depths}",
                1,
            )
        elif count == e.num_depths - 1:
            yield "layer missing", f"a layer is missing: {count} = {e.num_depths} - 1; often the last is dropped", 1
        elif count == e.num_depths + 1:
            yield (
                "layer too many",
                f"a layer too many: {count} = {e.num_depths} + 1; often the embedding or the final norm's output",
                1,
            )


def _of_one(shape: Shape, e: Expected) -> Iterator[_Found]:
    """Rules about a single tensor."""
    L, H, total = e.num_depths, e.hidden_size, sum(e.lengths)
    if len(shape) == 1:
        (n,) = shape
        if H is not None and n == H:
            yield "pooled", f"one row of {n} = H: the tokens were pooled, or only the last was kept", 3
        elif n in e.lengths:
            yield "hidden axis lost", f"the hidden axis is lost: {n} values for {n} tokens, one each", 2
        return
    if len(shape) == 4 and shape[0] == 1:
        shape = shape[1:]
    if len(shape) == 3:
        if L is not None and H is not None and shape[1:] == (L, H) and shape[0] in e.lengths and shape[0] != L:
            yield "axes swapped", f"the token axis comes first: {list(shape)} = [T, L, H], expected [L, T, H]", 0
            return
        if H is not None and shape[2] == H and len(e.lengths) > 1 and shape[:2] == (len(e.lengths), max(e.lengths)):
            yield (
                "padded batch",
                f"the batch was kept padded: {list(shape)} = [{len(e.lengths)} samples, longest {max(e.lengths)}, H]",
                0,
            )
            return
        tensor = _Tensor(shape, shape[0], shape[1], shape[2])
        if H is not None and shape[2] == H and shape[1] in e.lengths and L is not None:
            if shape[0] == 1:
                yield "single layer", f"one layer instead of {L}, or a batch axis of 1 left: {list(shape)}", 1
            elif shape[0] == L - 1:
                yield "layer missing", f"a layer is missing: {shape[0]} = {L} - 1; often the last is dropped", 1
            elif e.num_layers is not None and shape[0] == e.num_layers + 1:
                yield "all layers", f"every layer was captured: {shape[0]} = {e.num_layers} + 1, asked for {L}", 1
            elif shape[0] == L + 1:
                yield (
                    "layer too many",
                    f"a layer too many: {shape[0]} = {L} + 1; often the embedding or the final norm's output",
                    1,
                )
            return
    elif len(shape) == 2:
        if L is not None and shape[0] == L and shape[1] in e.lengths and shape[1] != H:
            text = f"the hidden axis is lost: {list(shape)} = [L, T], {shape[1]} values for {shape[1]} tokens, one each"
            yield "hidden axis lost", text, 1
            return
        tensor = _Tensor(shape, None, shape[0], shape[1])
    else:
        return
    for rule in _RULES:
        yield from rule(tensor, e)
    if H is not None and tensor.columns == H and tensor.rows == total and len(e.lengths) > 1:
        sums = " + ".join(str(n) for n in e.lengths)
        yield "batch not split", f"the batch was not split into its samples: {tensor.rows} = {sums} rows", 0


def _hidden_shard(t: _Tensor, e: Expected) -> Iterator[_Found]:
    if e.hidden_size is None or t.rows not in (*e.lengths, sum(e.lengths)) or t.columns == e.hidden_size:
        return
    sizes = [e.tensor_parallel_size] if e.tensor_parallel_size > 1 else [2, 4, 8, 16]
    for size in sizes:
        if t.columns * size == e.hidden_size:
            yield "one rank's shard", f"one rank's shard of the hidden axis: {t.columns} = {e.hidden_size} / {size}", 0


def _token_shard(t: _Tensor, e: Expected) -> Iterator[_Found]:
    size = e.tensor_parallel_size
    if t.columns != e.hidden_size or size < 2:
        return
    for length in dict.fromkeys((*e.lengths, sum(e.lengths))):
        if t.rows == -(-length // size) and t.rows not in e.lengths:
            yield (
                "sequence-parallel rows",
                f"one rank's share of the rows (sequence parallelism): {t.rows} = {length} / {size}"
                + (", rounded up" if length % size else ""),
                1,
            )
            return


def _concatenated(t: _Tensor, e: Expected) -> Iterator[_Found]:
    H = e.hidden_size
    if H is None:
        return
    for layers in dict.fromkeys(n for n in (e.num_depths, (e.num_depths or 0) - 1) if n is not None and n > 1):
        for length in dict.fromkeys(e.lengths):
            if t.columns == H and t.rows == layers * length and t.rows not in e.lengths:
                yield (
                    "layers along tokens",
                    f"the layers were concatenated along the token axis: {t.rows} = {layers} x {length}",
                    0,
                )
            if t.rows == length and t.columns == layers * H:
                yield (
                    "layers along hidden",
                    f"the layers were concatenated along the hidden axis: {t.columns} = {layers} x {H}",
                    0,
                )


def _transposed(t: _Tensor, e: Expected) -> Iterator[_Found]:
    if t.rows == e.hidden_size and t.columns in e.lengths and t.columns != t.rows:
        yield "transposed", f"token and hidden axis are exchanged: [{t.rows}, {t.columns}] = [H, T]", 0


def _rows_missing(t: _Tensor, e: Expected) -> Iterator[_Found]:
    if t.columns != e.hidden_size or t.rows in e.lengths or t.rows == 0:
        return
    longer = [length for length in e.lengths if length > t.rows]
    blocks = [length for length in longer if (length - t.rows) % _BLOCK == 0]
    for length in dict.fromkeys(blocks or longer[-1:]):
        k = length - t.rows
        whole = f", {k // _BLOCK} x {_BLOCK} as caches keep them" if k % _BLOCK == 0 else ""
        yield (
            "cached prefix",
            f"rows of a cached prefix are missing: {t.rows} = {length} - {k}{whole}",
            2 if blocks else 4,
        )


def _rows_added(t: _Tensor, e: Expected) -> Iterator[_Found]:
    if t.columns != e.hidden_size or t.rows in e.lengths:
        return
    for length in dict.fromkeys(e.lengths):
        if t.rows == length + 1:
            yield "decoded row", f"the row of a decoded token was kept: {t.rows} = {length} + 1", 2
        for unit in _ROUND:
            if t.rows > length and t.rows == -(-length // unit) * unit:
                yield (
                    "padding rows",
                    f"rows of padding were kept: {t.rows} = {length} rounded up to a multiple of {unit}",
                    3,
                )
                break


_RULES: tuple[_Rule, ...] = (_hidden_shard, _token_shard, _concatenated, _transposed, _rows_missing, _rows_added)


def _some(numbers: Iterable[int]) -> str:
    values = list(numbers)
    return ", ".join(str(n) for n in values[:6]) + (", ..." if len(values) > 6 else "")
