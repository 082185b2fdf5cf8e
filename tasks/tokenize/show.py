"""Tokenized conversations and statistics for a person at a terminal."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from tasks.model import Checkpoint
from tasks.samples import Sample, SampleTable
from tasks.tokenize.config import Data
from tasks.tokenize.errors import Problem
from tasks.tokenize.pipeline import tokenize
from tasks.tokenize.report import TokenizeReport
from tasks.tokenize.rows import printable
from tasks.tokenize.tokenizer import TextTokenizer
from tasks.vocabulary import Identity

SUPERVISED = "bold green"
OTHER = "dim"

Decode = Callable[[Sequence[int]], str]
"""Token ids to text, control tokens included, e.g. ``TextTokenizer(directory).encoder.decode``."""


def preview(
    console: Console,
    data: Data,
    checkpoint: Checkpoint,
    identity: Identity,
    max_model_len: int,
    count: int,
    skipped: bool = False,
) -> TokenizeReport:
    """Tokenize the data as a run would, print the first ``count`` samples and the statistics, and keep nothing.

    ``skipped``: print also each row that gives no sample.

    Raises:
        TokenizeError: see :func:`tasks.tokenize.pipeline.tokenize`.
    """

    def name(problem: Problem) -> None:
        console.print(str(problem), highlight=False, markup=False, soft_wrap=True)

    with tempfile.TemporaryDirectory(prefix="layertap-") as scratch:
        path = Path(scratch) / "samples.arrow"
        report = tokenize(data, checkpoint, identity, max_model_len, path, on_problem=name if skipped else None)
        decode = TextTokenizer(checkpoint.path, checkpoint.trust_remote_code).encoder.decode if count else str
        show(console, SampleTable(path), report, decode, count)
    return report


def show(console: Console, table: SampleTable, report: TokenizeReport, decode: Decode, count: int) -> None:
    """Print the first ``count`` samples with supervised tokens in colour, then the statistics of all."""
    for row in range(min(count, len(table))):
        console.print(conversation(table[row], decode))
    console.print(statistics(report, table.num_tokens))


def conversation(sample: Sample, decode: Decode) -> Panel:
    """A sample's text, the supervised tokens in colour."""
    text = Text()
    for ids, supervised in stretches(sample):
        text.append(printable(decode(ids.tolist())), SUPERVISED if supervised else OTHER)
    share = sample.loss_mask.mean()
    facts = f"{sample.num_tokens:,} tokens, {share:.0%} supervised"
    return Panel(text, title=Text(sample.source_id), subtitle=Text(facts), title_align="left", subtitle_align="left")


def stretches(sample: Sample) -> Iterator[tuple[npt.NDArray[np.int32], bool]]:
    """The sample in stretches of ids that are all supervised, or all not."""
    edges = np.flatnonzero(np.diff(sample.loss_mask)) + 1
    for ids, mask in zip(np.split(sample.input_ids, edges), np.split(sample.loss_mask, edges), strict=True):
        yield ids, bool(mask[0])


def statistics(report: TokenizeReport, num_tokens: npt.NDArray[np.int32]) -> RenderableType:
    """Rows, lengths, supervised share, and what was skipped and why.

    Args:
        report: what became of the rows.
        num_tokens: [samples], their lengths.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(style="dim")

    def line(name: str, value: int | str, note: str = "") -> None:
        table.add_row(name, value if isinstance(value, str) else f"{value:,}", escape(note))

    line("rows read", report.read, " + ".join(f"{n:,}" for n in report.by_source) if len(report.by_source) > 1 else "")
    line("samples", report.kept, f"{report.duplicates:,} with the tokens of another" if report.duplicates else "")
    for reason, count in sorted(report.skipped.items(), key=lambda r: -r[1]):
        first = next((p for p in report.problems if p.reason == reason), None)
        line(f"skipped: {reason}", count, f"{first.file}:{first.number}: {first.detail}" if first else "")
    if report.truncated:
        line("truncated", report.truncated, f"{report.tokens_cut:,} tokens lost")
    if report.split:
        line("split", report.split)
    if report.ids_used_twice:
        line("ids used twice", report.ids_used_twice, str(report.shared_ids[0]))
    for fields, count in report.unread.items():
        line("not read", count, fields)
    share = report.supervised_tokens / report.tokens if report.tokens else 0.0
    line("tokens", report.tokens, f"{report.tokens_per_second:,.0f} a second")
    line("supervised", f"{share:.1%}", ", ".join(f"{n:,} by {how}" for how, n in report.methods.items()))
    if len(num_tokens):
        low, median, high, most = np.percentile(num_tokens, [5, 50, 95, 100])
        line(
            "tokens a sample",
            f"{median:,.0f}",
            f"median; 5% below {low:,.0f}, 95% below {high:,.0f}, longest {most:,.0f}",
        )
    for name, count in report.counts.items():
        if count:
            line(name.replace("_", " "), count)
    return Group(table)
