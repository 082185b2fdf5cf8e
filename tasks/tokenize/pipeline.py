"""From the sources to the table of samples."""

import os
import time
from array import array
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from tasks.model import Checkpoint
from tasks.samples import Sample, SampleTable, SampleTableWriter
from tasks.tokenize.config import Columns, Data
from tasks.tokenize.encode import Encoded, RowEncoder
from tasks.tokenize.errors import BadRow, BadRowError, Problem
from tasks.tokenize.report import MAX_PROBLEMS, How, SharedId, TokenizeReport
from tasks.tokenize.rows import Item, decode, parse, printable
from tasks.tokenize.sources import MAX_LINE_BYTES, Row, rows
from tasks.tokenize.workers import map_in_processes
from tasks.vocabulary import Identity

BATCH_ROWS = 64
BATCH_BYTES = 2**20
MAX_DETAIL = 500
POOL_FROM_BATCHES = 8  # smaller inputs are done before another process has started

Progress = Callable[[int, int], None]
"""Called with the rows read and the tokens kept so far."""


@dataclass(frozen=True)
class Job:
    """What a process needs to turn rows into samples."""

    directory: Path
    vocab_size: int
    trust_remote_code: bool
    data: Data
    identity: Identity
    max_tokens: int

    def encoder(self) -> RowEncoder:
        return RowEncoder(self.directory, self.vocab_size, self.data, self.trust_remote_code)

    def processor(self) -> "Callable[[list[Row]], list[Outcome]]":
        """What turns a batch of rows into outcomes; each process makes its own."""
        return partial(process, self, self.encoder())


@dataclass(frozen=True, eq=False)
class Outcome:
    """What became of one row."""

    file: str
    row: int
    source: int
    samples: tuple[Sample, ...] = ()
    how: How = "given"
    tokens_cut: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    unread: str = ""
    problem: Problem | None = None


def tokenize(
    data: Data,
    checkpoint: Checkpoint,
    identity: Identity,
    max_model_len: int,
    out: Path,
    on_progress: Progress | None = None,
    on_problem: Callable[[Problem], None] | None = None,
) -> TokenizeReport:
    """Tokenize all rows of the sources into a table at ``out``.

    Samples have at most ``max_model_len - 1`` tokens, since the engine samples one more. The table's rows are in
    the order of the sources' rows, whatever the number of processes.

    Args:
        data: the sources, and what to do with them.
        checkpoint: whose tokenizer and chat template are used.
        identity: of the store, for the samples' keys.
        max_model_len: of the engine.
        out: the table's file.
        on_progress: called after each row.
        on_problem: called with each row that gives no sample.

    Raises:
        SourceError: a source is missing or damaged.
        TokenizerError: the checkpoint's tokenizer or chat template cannot be used.
        BadRowError: a row is wrong and ``data.on_error`` is ``fail``.
    """
    started = time.monotonic()
    job = Job(checkpoint.path, checkpoint.vocab_size, checkpoint.trust_remote_code, data, identity, max_model_len - 1)
    report = TokenizeReport(by_source=[0] * len(data.all_sources))
    seen = _Seen()
    unfinished = out.with_name(out.name + ".partial")
    with SampleTableWriter(unfinished) as table, closing(outcomes(job, out.parent)) as stream:
        for outcome in stream:
            _add(report, outcome)
            if outcome.problem and on_problem:
                on_problem(outcome.problem)
            if outcome.problem and data.on_error == "fail":
                raise BadRowError(outcome.problem)
            table.add(outcome.samples)
            for sample in outcome.samples:
                seen.add(sample, outcome.file, outcome.row)
            if on_progress:
                on_progress(report.read, report.tokens)
    unfinished.replace(out)
    report.duplicates = seen.duplicates()
    shared = seen.ids_used_twice()
    report.ids_used_twice = len(shared)
    written = SampleTable(out)
    report.shared_ids = [
        SharedId(written[first].source_id, seen.place(first), seen.place(last)) for first, last in shared[:MAX_PROBLEMS]
    ]
    report.seconds = time.monotonic() - started
    return report


def _add(report: TokenizeReport, outcome: Outcome) -> None:
    report.read += 1
    report.by_source[outcome.source] += 1
    if outcome.problem:
        reason = outcome.problem.reason
        report.skipped[reason] = report.skipped.get(reason, 0) + 1
        if len(report.problems) < MAX_PROBLEMS:
            report.problems.append(outcome.problem)
        return
    report.kept += len(outcome.samples)
    report.truncated += outcome.tokens_cut > 0
    report.tokens_cut += outcome.tokens_cut
    report.split += len(outcome.samples) > 1
    report.tokens += sum(s.num_tokens for s in outcome.samples)
    report.supervised_tokens += sum(int(s.loss_mask.sum()) for s in outcome.samples)
    report.methods[outcome.how] = report.methods.get(outcome.how, 0) + len(outcome.samples)
    for name, count in outcome.counts.items():
        report.counts[name] = report.counts.get(name, 0) + count
    if outcome.unread:
        report.unread[outcome.unread] = report.unread.get(outcome.unread, 0) + 1


class _Seen:
    """Finds what occurs twice, with 36 bytes a sample: a hash each of key, loss mask and id, and the place."""

    def __init__(self) -> None:
        self._keys = array("Q")
        self._masks = array("q")
        self._ids = array("q")
        self._files = array("I")
        self._rows = array("Q")
        self._names: dict[str, int] = {}

    def add(self, sample: Sample, file: str, row: int) -> None:
        self._keys.append(int(sample.key[:16], 16))
        self._masks.append(hash(np.asarray(sample.loss_mask, np.bool_).tobytes()))
        self._ids.append(hash(sample.source_id))
        self._files.append(self._names.setdefault(file, len(self._names)))
        self._rows.append(row)

    def place(self, sample: int) -> str:
        return f"{list(self._names)[self._files[sample]]}:{self._rows[sample]}"

    def duplicates(self) -> int:
        return len(self._keys) - len(np.unique(np.frombuffer(self._keys, dtype=np.uint64))) if self._keys else 0

    def ids_used_twice(self) -> list[tuple[int, int]]:
        """Of each id that stands for different contents, the first sample that loses it and the one that it names."""
        if not self._keys:
            return []
        keys, masks = np.frombuffer(self._keys, np.uint64), np.frombuffer(self._masks, np.int64)
        _, of_id = np.unique(np.frombuffer(self._ids, np.int64), return_inverse=True)
        last = np.zeros(of_id.max() + 1, np.int64)
        np.maximum.at(last, of_id, np.arange(len(keys)))
        named = last[of_id]
        others = np.flatnonzero((keys != keys[named]) | (masks != masks[named]))
        _, first = np.unique(of_id[others], return_index=True)
        return [(int(sample), int(last[of_id[sample]])) for sample in others[np.sort(first)]]


def outcomes(job: Job, scratch: Path) -> Generator[Outcome, None, None]:
    """What becomes of each row of the sources, in their order; see :func:`tokenize` for errors.

    ``scratch``: a directory for temporary files.
    """
    batches = _batches(rows(job.data, scratch))
    head: list[list[Row]] = []
    processes = job.data.processes or len(os.sched_getaffinity(0))
    if processes > 1:
        for batch in batches:
            head.append(batch)
            if len(head) == POOL_FROM_BATCHES:
                for results in map_in_processes(job.processor, _chain(head, batches), processes):
                    yield from results
                return
    processor = job.processor()
    for batch in _chain(head, batches):
        yield from processor(batch)


def _chain(head: Sequence[list[Row]], rest: Iterator[list[Row]]) -> Iterator[list[Row]]:
    yield from head
    yield from rest


def _batches(stream: Iterator[Row]) -> Iterator[list[Row]]:
    batch: list[Row] = []
    size = 0
    for row in stream:
        batch.append(row)
        size += len(row.value) if isinstance(row.value, bytes) else 0
        if len(batch) >= BATCH_ROWS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def process(job: Job, encoder: RowEncoder, batch: Sequence[Row]) -> list[Outcome]:
    """Turn a batch of rows into samples."""
    columns = [s.columns for s in job.data.all_sources]
    items = [_item(row, columns[row.source]) for row in batch]
    outcomes = [_outcome(job, row, e) for row, e in zip(batch, encoder.encode(items), strict=True)]
    return [
        outcome if isinstance(item, BadRow) else replace(outcome, unread=item.unread)
        for outcome, item in zip(outcomes, items, strict=True)
    ]


def _item(row: Row, columns: Columns) -> Item | BadRow:
    try:
        if row.value is None:
            raise BadRow("too-long", f"the line is longer than {MAX_LINE_BYTES} bytes")
        value = decode(row.value) if isinstance(row.value, bytes) else row.value
        return parse(value, columns, f"{row.file}:{row.number}")
    except BadRow as e:
        return e


def _outcome(job: Job, row: Row, encoded: Encoded | BadRow) -> Outcome:
    try:
        if isinstance(encoded, BadRow):
            raise encoded
        samples = _cut(job, encoded)
    except BadRow as e:
        detail = printable(e.detail) if len(e.detail) <= MAX_DETAIL else printable(e.detail[:MAX_DETAIL]) + "..."
        return Outcome(row.file, row.number, row.source, problem=Problem(row.file, row.number, e.reason, detail))
    beyond = max(0, len(encoded.input_ids) - job.max_tokens) if job.data.overflow == "truncate" else 0
    return Outcome(row.file, row.number, row.source, samples, encoded.how, beyond, dict(encoded.counts))


def _cut(job: Job, encoded: Encoded) -> tuple[Sample, ...]:
    """The sample, or its pieces, of at most ``job.max_tokens`` tokens each."""
    length, limit = len(encoded.input_ids), job.max_tokens
    if not encoded.loss_mask.any():
        raise BadRow("unsupervised", "`loss_mask` supervises no token")
    if length <= limit:
        return (_sample(job, encoded, encoded.id, 0, length),)
    if job.data.overflow == "skip":
        raise BadRow("too-long", f"{length} tokens are more than the {limit} that max_model_len allows")
    if job.data.overflow == "truncate":
        if not encoded.loss_mask[:limit].any():
            raise BadRow("unsupervised", f"the first {limit} of {length} tokens have no supervised token")
        return (_sample(job, encoded, encoded.id, 0, limit),)
    starts = [s for s in range(0, length, limit) if encoded.loss_mask[s : s + limit].any()]
    return tuple(_sample(job, encoded, f"{encoded.id}#{s // limit}", s, min(s + limit, length)) for s in starts)


def _sample(job: Job, encoded: Encoded, source_id: str, start: int, end: int) -> Sample:
    ids = encoded.input_ids[start:end].astype(np.int32)
    return Sample(source_id, job.identity.key(ids), ids, encoded.loss_mask[start:end])
