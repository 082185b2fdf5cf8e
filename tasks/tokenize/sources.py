"""Streams of raw rows from files; a row is not looked into here."""

import glob
import io
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.tokenize.config import Data, Source
from tasks.tokenize.errors import SourceError

MAX_LINE_BYTES = 256 * 2**20

JSONL = (".jsonl", ".json", ".ndjson")
COMPRESSED = (".gz", ".zst")


@dataclass(frozen=True)
class Row:
    """One row as it stands in its source."""

    source: int
    """Index of the source in the configuration."""
    file: str
    """Name that messages and made-up ids use."""
    number: int
    """Line number in a JSONL file, row number elsewhere; the first is 1."""
    value: bytes | Mapping[str, Any] | None
    """A JSONL line, a row with columns, or None for a line longer than :data:`MAX_LINE_BYTES`."""


def rows(data: Data) -> Iterator[Row]:
    """All rows of the sources in their order, which depends on the configuration alone.

    Raises:
        SourceError: a source is missing, damaged or of an unknown format.
    """
    streams: list[Iterator[Row]] = [islice(_source(i, s), s.limit) for i, s in enumerate(data.all_sources)]
    return islice(_mixed(streams, [s.weight for s in data.all_sources]), data.limit)


def _mixed(streams: list[Iterator[Row]], weights: list[float]) -> Iterator[Row]:
    """Draw from each stream in proportion to its weight, until all are exhausted."""
    drawn = [0] * len(streams)
    active = list(range(len(streams)))
    while active:
        index = min(active, key=lambda i: ((drawn[i] + 1) / weights[i], i))
        row = next(streams[index], None)
        if row is None:
            active.remove(index)
        else:
            drawn[index] += 1
            yield row


def _source(index: int, source: Source) -> Iterator[Row]:
    assert source.path is not None
    for path in files(source.path):
        yield from _jsonl(index, path, path.name)


def files(path: Path) -> list[Path]:
    """The files that a path means: itself, or the matches of a pattern by name.

    Raises:
        SourceError: there is none, or one is of an unknown format.
    """
    if path.exists():
        found = [path]
    elif glob.has_magic(path.name):
        found = sorted(path.parent.glob(path.name))
        if not found:
            raise SourceError(f"no file matches {path}")
    else:
        raise SourceError(f"no file {path}: check `data.path` (relative paths start at the working directory)")
    for each in found:
        if each.is_dir():
            raise SourceError(f"{each} is a directory: give a file, a pattern such as {each}/*.jsonl, or `dataset`")
        if _format(each) not in JSONL:
            raise SourceError(f"{each}: unknown format; known are {', '.join(JSONL)}, these with .gz or .zst")
    return found


def _format(path: Path) -> str:
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _jsonl(index: int, path: Path, name: str) -> Iterator[Row]:
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(MAX_LINE_BYTES + 1):
                number += 1
                if number == 1:
                    line = line.removeprefix(b"\xef\xbb\xbf")
                value: bytes | None = line
                if len(line) > MAX_LINE_BYTES:
                    value = None
                    while line and not line.endswith(b"\n"):
                        line = stream.readline(MAX_LINE_BYTES)
                if value is None or not value.isspace():
                    yield Row(index, name, number, value)
    except OSError as e:
        raise SourceError(f"{path} cannot be read after line {number}: {type(e).__name__}: {e}") from e


def _open(path: Path) -> io.BufferedReader:
    # Arrow's readers report a cut-off archive; the zstandard package's just ends.
    raw = pa.input_stream(str(path), compression={".gz": "gzip", ".zst": "zstd"}.get(path.suffix))
    return io.BufferedReader(raw, 2**20)
