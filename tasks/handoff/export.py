"""An export: the rows of a store as another project's files, in a directory of their own.

A file is written under another name, read back, compared with what the store gave, and renamed. The journal then
says what was written by what (the row's content and the depths) and with which bytes. A later call counts a row as
done if the journal says the same of it and the file still has exactly those bytes; a name alone means nothing.
"""

import fcntl
import hashlib
import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import google_crc32c
import numpy as np
import torch

from tasks.handoff.errors import HandoffError, UnreadableSample
from tasks.handoff.example import Example
from tasks.handoff.formats import Format, Found, Row, Vocabulary, names
from tasks.store import FinalNorm, Reader
from tasks.store.errors import DamagedSample, NoSpace, storage_failures
from tasks.tokenize.draft_vocabulary import draft_vocabulary

DESCRIPTION = "layertap-export.json"
PRIVATE = ".layertap"
_JOURNAL = "journal.jsonl"
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Written:
    """What the journal says of a file."""

    recipe: str
    nbytes: int
    crc32c: int


@dataclass(frozen=True)
class Group:
    """Rows that share one file."""

    recipe: str
    rows: tuple[Row, ...]


@dataclass
class ExportReport:
    """What an export did."""

    directory: str
    format: str
    trainer: str
    """What to tell the trainer: where the files are, and which layers."""
    rows: int = 0
    tokens: int = 0
    present: int = 0
    """Files that were there already, byte for byte."""
    written: int = 0
    linked: int = 0
    """Rows whose file is a hard link to another row's."""
    removed: int = 0
    """Files of rows that the store no longer has."""
    nbytes: int = 0
    """Written by this call."""
    single_token: int = 0
    unsupervised: int = 0
    """Rows without a supervised token; a trainer takes no loss from them."""
    coverage: float | None = None
    """Share of the supervised tokens that the draft vocabulary knows."""
    failed: dict[str, str] = field(default_factory=dict)
    """Row -> why its file could not be written."""

    @property
    def complete(self) -> bool:
        return not self.failed

    @property
    def message(self) -> str:
        done = self.present + self.written + self.linked
        return f"{done} of {self.rows} rows in {self.directory}, {len(self.failed)} failed"

    def add(self, chunk: "ExportReport") -> None:
        """Take a chunk's counts into account."""
        self.written += chunk.written
        self.linked += chunk.linked
        self.nbytes += chunk.nbytes
        self.failed |= chunk.failed


class Export:
    """One export, open for writing; a context manager, and one at a time for a directory."""

    def __init__(self, reader: Reader, of: Format, directory: Path, aux: Sequence[int] | None = None) -> None:
        """Plan the export; nothing is written yet.

        Args:
            reader: of the store.
            of: the format.
            directory: empty, absent, or of an earlier export of the same.
            aux: auxiliary depths instead of the format's own.

        Raises:
            HandoffError: the store lacks a depth or the final norm.
        """
        self.reader, self.format, self.directory = reader, of, directory
        self.depths = of.select_depths(reader.identity, aux)
        self._norm = self._needed_norm()
        self.rows = tuple(_rows(reader, of.by_key))
        self._written: dict[str, Written] = {}
        self._lock = threading.Lock()

    def _needed_norm(self) -> FinalNorm | None:
        """The norm that must be applied, if any."""
        last, normed = self.reader.identity.num_layers, self.reader.identity.last_is_normed
        if normed and not self.format.takes_normed and last in self.depths:
            raise HandoffError(
                f"{self.format.name} reads r_{last} before the final norm, but the store's last states were imported "
                "after it, from which r_L cannot be computed"
            )
        if normed or not self.format.takes_normed:
            return None
        norm = self.reader.final_norm
        if norm is None:
            raise HandoffError(
                f"{self.format.name} reads the state after the final norm, which the store does not hold"
            )
        return norm

    @property
    def description(self) -> dict[str, Any]:
        """What decides the content of every file, and what the trainer has to be told."""
        decisive = {
            "format": self.format.name,
            "version": self.format.version,
            "identity": self.reader.identity.digest,
            "depths": list(self.depths),
            "final_state": "after the final norm" if self.format.takes_normed else "before the final norm",
        }
        return decisive if self.format.by_key else decisive | {"layer_ids": self.format.layer_ids(self.depths)}

    @property
    def trainer(self) -> str:
        """What to tell the trainer: where the files are, and which layers."""
        if self.format.by_key:
            return names(self.depths)
        ids = self.format.layer_ids(self.depths)
        listed = str(ids) if self.format.layer_option.endswith(":") else " ".join(map(str, ids))
        return f"{self.format.path_option.format(self.directory)}; {self.format.layer_option} {listed}"

    # --- the directory

    def __enter__(self) -> "Export":
        description = self.directory / DESCRIPTION
        if self.directory.exists() and not description.exists() and any(self.directory.iterdir()):
            raise HandoffError(f"{self.directory} is not empty and holds no export; choose another directory")
        if description.exists():
            found = json.loads(description.read_text())
            if found != self.description:
                raise HandoffError(
                    f"{self.directory} holds another export ({_difference(found, self.description)}); choose another "
                    "directory"
                )
        with storage_failures(self.directory):
            self._private.mkdir(parents=True, exist_ok=True)
            self._journal = (self._private / _JOURNAL).open("a+b")
            try:
                fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._journal.close()
                raise HandoffError(f"another export is writing to {self.directory}; wait for it to end") from None
            description.write_text(json.dumps(self.description, indent=1))
        self._read_journal()
        for leftover in self._private.glob("*.unfinished*"):  # of a run that was killed
            leftover.unlink()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._journal.close()

    @property
    def _private(self) -> Path:
        return self.directory / PRIVATE

    def _read_journal(self) -> None:
        self._journal.seek(0)
        content = self._journal.read()
        for line in content.split(b"\n"):
            try:
                path, recipe, nbytes, crc = json.loads(line)
            except ValueError:  # torn by a crash; its file will not count as done
                continue
            self._written[path] = Written(recipe, nbytes, crc)
        if content and not content.endswith(b"\n"):
            self._journal.write(b"\n")

    # --- what is to do

    def pending(self, workers: int = 4) -> tuple[list[Group], ExportReport]:
        """Groups of rows of which a file is not there byte for byte, and a report of those that are.

        Files of rows that the store no longer has are removed, and what would let a trainer take the directory for a
        finished one.
        """
        report = ExportReport(str(self.directory), self.format.name, self.trainer, len(self.rows))
        report.tokens = sum(row.num_tokens for row in self.rows)
        report.single_token = sum(row.num_tokens == 1 for row in self.rows)
        kept = {self.format.path(row) for row in self.rows}
        for path in set(self._written) - kept:
            (self.directory / path).unlink(missing_ok=True)
            report.removed += 1
        with ThreadPoolExecutor(workers) as pool:
            there = pool.map(self._is_done, self.rows)
            done = {row.number for row, is_done in zip(self.rows, there, strict=True) if is_done}
        report.present = len(done)
        groups: dict[str, list[Row]] = {}
        for row in self.rows:
            groups.setdefault(self._recipe(row), []).append(row)
        pending = [
            Group(recipe, tuple(sorted(rows, key=lambda row: row.number not in done)))
            for recipe, rows in groups.items()
            if any(row.number not in done for row in rows)
        ]
        self._done = done
        if pending or report.removed:
            self.format.unfinish(self.directory)
        return pending, report

    def _is_done(self, row: Row) -> bool:
        path = self.format.path(row)
        written = self._written.get(path)
        if written is None or written.recipe != self._recipe(row):
            return False
        try:
            return checksum(self.directory / path) == (written.nbytes, written.crc32c)
        except OSError:
            return False

    def _recipe(self, row: Row) -> str:
        return hashlib.sha256(json.dumps([self._decisive, *self.format.content(row)]).encode()).hexdigest()[:32]

    @cached_property
    def _decisive(self) -> str:
        return json.dumps(self.description, sort_keys=True)

    def chunks(self, pending: Sequence[Group], chunk_tokens: int) -> Iterator[list[Group]]:
        """Groups in batches of about this many tokens."""
        batch: list[Group] = []
        tokens = 0
        for group in pending:
            if batch and tokens + group.rows[0].num_tokens > chunk_tokens:
                yield batch
                batch, tokens = [], 0
            batch.append(group)
            tokens += group.rows[0].num_tokens
        if batch:
            yield batch

    def require_room(self, pending: Sequence[Group], force: bool = False) -> int:
        """Bytes that the pending files need.

        Raises:
            NoSpace: more than there are.
        """
        identity = self.reader.identity
        per_token = len(self.depths) * identity.hidden_size * (2 if identity.dtype == "bfloat16" else 4)
        lengths = [group.rows[0].num_tokens for group in pending if group.rows[0].number not in self._done]
        needed = sum(self.format.nbytes(n, n * per_token) for n in lengths)
        free = shutil.disk_usage(self.directory).free
        if needed > free and not force:
            raise NoSpace(
                f"{self.directory}: {needed / 1e9:.1f} GB needed for {len(lengths)} files, {free / 1e9:.1f} GB free. "
                "Free space, choose another directory, or go on with --force"
            )
        return needed

    # --- writing

    def write(self, groups: Iterable[Group]) -> ExportReport:
        """Write the files of these groups; a sample that cannot be read is reported, and the others are written.

        Raises:
            StorageFailure: the disk is full, read-only or not permitted.
        """
        report = ExportReport(str(self.directory), self.format.name, self.trainer)
        for group in groups:
            first, *others = group.rows
            try:
                if first.number not in self._done:
                    report.nbytes += self._write_row(first, group.recipe)
                    report.written += 1
            except (DamagedSample, UnreadableSample) as error:
                report.failed |= {row.name: str(error) for row in group.rows if row.number not in self._done}
                continue
            for row in others:
                if row.number not in self._done:
                    self._link(first, row)
                    report.linked += 1
        return report

    def example(self, row: Row) -> Example:
        """The row as the format wants it: its depths, and the final norm applied where that is expected."""
        sample = self.reader.read(row.name, self.depths)
        states_LTH = sample.hidden_states
        if self._norm is not None:
            states_LTH = torch.cat([states_LTH[:-1], self._norm.apply(states_LTH[-1])[None]])
        return Example(
            row.name, row.key, sample.input_ids, sample.loss_mask.long(), states_LTH, self.format.takes_normed
        )

    def _write_row(self, row: Row, recipe: str) -> int:
        example = self.example(row)
        path = self.directory / self.format.path(row)
        scratch = self._private / f"{row.number}.unfinished{path.suffix}"
        with storage_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self.format.write(scratch, example, self.depths)
            self._check(scratch, example)
            nbytes, crc = checksum(scratch)
            scratch.replace(path)
            self._note(row, Written(recipe, nbytes, crc))
        return nbytes

    def _check(self, path: Path, example: Example) -> None:
        """Raise UnreadableSample unless the file gives back what was written, bit for bit."""
        read = self.format.load(Found(path))
        same = (
            torch.equal(read.input_ids_T, example.input_ids_T)
            and (not self.format.holds_mask or torch.equal(read.loss_mask_T, example.loss_mask_T))
            and read.states_LTH.dtype == example.states_LTH.dtype
            and torch.equal(read.states_LTH, example.states_LTH)
        )
        if not same:
            raise UnreadableSample("changed", f"{path.name} does not read as it was written; check the disk")

    def _link(self, first: Row, row: Row) -> None:
        """Give a row the file of another; a copy where the file system has no hard links."""
        source, path = (self.directory / self.format.path(each) for each in (first, row))
        scratch = self._private / f"{row.number}.unfinished{path.suffix}"
        with storage_failures(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch.unlink(missing_ok=True)
            try:
                os.link(source, scratch)
            except OSError:
                shutil.copyfile(source, scratch)
            scratch.replace(path)
            scratch.unlink(missing_ok=True)  # renaming a link onto the same file leaves both
            self._note(row, self._written[self.format.path(first)])

    def _note(self, row: Row, written: Written) -> None:
        path = self.format.path(row)
        line = json.dumps([path, written.recipe, written.nbytes, written.crc32c])
        with self._lock:
            self._journal.write(line.encode() + b"\n")
            self._journal.flush()
            self._written[path] = written

    # --- what lies beside the files

    def finish(self, report: ExportReport, vocab_size: int | None = None, draft_vocab: int | None = None) -> None:
        """Count tokens, choose a draft vocabulary if one is asked for, and write what lies beside the files.

        Args:
            report: of the export; the counts are added.
            vocab_size: of the target model; needed for a draft vocabulary.
            draft_vocab: tokens that the draft model knows.

        Raises:
            ValueError: no token is supervised, or the vocabulary is larger than the model's.
        """
        counts_V = np.zeros(vocab_size or 0, dtype=np.int64)
        for row in self.rows:
            ids_T, mask_T = self.reader.tokens(row.name)
            supervised = np.bincount(ids_T[mask_T])
            if len(supervised) > len(counts_V):
                if vocab_size is not None:
                    raise HandoffError(
                        f"{row.name} has a token of {len(supervised) - 1} in a vocabulary of {vocab_size}"
                    )
                counts_V = np.pad(counts_V, (0, len(supervised) - len(counts_V)))
            counts_V[: len(supervised)] += supervised
            report.unsupervised += not mask_T.any()
        draft = None if draft_vocab is None else draft_vocabulary(counts_V, draft_vocab)
        report.coverage = None if draft is None else draft.coverage
        frequencies = {int(token): int(counts_V[token]) for token in np.flatnonzero(counts_V)}
        with storage_failures(self.directory):
            self.format.finish(
                self.directory, self.rows, lambda row: self.reader.tokens(row.name), Vocabulary(frequencies, draft)
            )


def _rows(reader: Reader, by_key: bool) -> Iterator[Row]:
    """One row a conversation in the order in which they were recorded, or one a distinct sample."""
    names: Iterable[tuple[str, tuple[str, ...]]]
    if by_key:
        names = [(key, reader.sources_of(key)) for key in reader.keys]
    else:
        names = [(reader.key_of(source), (source,)) for source in reader.source_ids]
        names += [(key, ()) for key in reader.keys if not reader.sources_of(key)]
    for number, (key, sources) in enumerate(names):
        row = Row(number, key, sources, reader.num_tokens(key), "")
        yield replace(row, mask=reader.mask_digest(row.name))


def described_aux(directory: Path) -> tuple[int, ...] | None:
    """Auxiliary depths of the files in a directory that an export wrote; None of any other."""
    try:
        depths = json.loads((directory / DESCRIPTION).read_text())["depths"]
        return tuple(int(depth) for depth in depths[:-1])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def checksum(path: Path) -> tuple[int, int]:
    """(bytes, crc32c) of a file."""
    size = crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size, crc = size + len(block), google_crc32c.extend(crc, block)
    return size, crc


def _difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {found.get(name)!r} instead of {wanted[name]!r}" for name in wanted if found.get(name) != wanted[name]
    )
