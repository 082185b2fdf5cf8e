"""Streams of raw rows from files; a row is not looked into here."""

import glob
import io
import pickle
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tasks.tokenize.config import Data, Source
from tasks.tokenize.errors import SourceError

MAX_LINE_BYTES = 256 * 2**20

JSONL = (".jsonl", ".json", ".ndjson")
COMPRESSED = (".gz", ".zst")
PARQUET = ".parquet"
ROWS_PER_READ = 256
DEFAULT_SPLIT = "train"


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


def rows(data: Data, scratch: Path) -> Iterator[Row]:
    """All rows of the sources in an order that depends on the configuration and the data alone.

    ``scratch``: a directory for the rows of sources that are shuffled, as large as these.

    Raises:
        SourceError: a source is missing, damaged or of an unknown format.
    """
    names = Counter(path.name for s in data.all_sources if s.path for path in set(files(s.path)))
    streams: list[Iterator[Row]] = []
    for index, source in enumerate(data.all_sources):
        stream = _source(index, source, names)
        if data.shuffle_seed is not None:
            stream = _shuffled(stream, np.random.default_rng([data.shuffle_seed, index]), scratch)
        streams.append(islice(stream, source.limit))
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


def _shuffled(stream: Iterator[Row], rng: np.random.Generator, scratch: Path) -> Iterator[Row]:
    """The rows in random order, by way of a temporary file; in memory are 16 bytes a row."""
    with tempfile.TemporaryFile(dir=scratch) as spool:
        starts = array("Q")
        for row in stream:
            starts.append(spool.tell())
            pickle.dump(row, spool, pickle.HIGHEST_PROTOCOL)
        for index in rng.permutation(len(starts)):
            spool.seek(starts[index])
            row = pickle.load(spool)
            assert isinstance(row, Row)
            yield row


def _source(index: int, source: Source, names: Counter[str]) -> Iterator[Row]:
    if source.dataset is not None:
        yield from _dataset(index, source)
        return
    assert source.path is not None
    for path in files(source.path):
        name = path.name if names[path.name] == 1 else str(path)
        yield from (_parquet if _format(path) == PARQUET else _jsonl)(index, path, name)


def files(path: Path) -> list[Path]:
    """The files that a path means: itself, or the matches of a pattern by name.

    Raises:
        SourceError: there is none, or one is of an unknown format.
    """
    path = path.expanduser()
    path = path.expanduser()
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
        if _format(each) not in (*JSONL, PARQUET):
            known = f"{', '.join(JSONL)}, these with .gz or .zst, and {PARQUET}"
            raise SourceError(f"{each}: unknown format; known are {known}")
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
                    if line.lstrip().startswith(b"["):
                        raise SourceError(
                            f"{path} is one JSON array: write one object a line (jq -c '.[]' FILE), or name its "
                            "directory as a `dataset`"
                        )
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


def _parquet(index: int, path: Path, name: str) -> Iterator[Row]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(ROWS_PER_READ):
                for value in batch.to_pylist():
                    number += 1
                    yield Row(index, name, number, without_nulls(value))
    except (OSError, pa.ArrowException) as e:
        raise SourceError(f"{path} cannot be read after row {number}: {type(e).__name__}: {e}") from e


def _dataset(index: int, source: Source) -> Iterator[Row]:
    name = "/".join(filter(None, (source.dataset, source.config))) + f"[{source.split or DEFAULT_SPLIT}]"
    table = _load(source)
    number = 0
    for batch in table.with_format("arrow").iter(ROWS_PER_READ):
        for value in batch.to_pylist():
            number += 1
            yield Row(index, name, number, without_nulls(value))


def _load(source: Source) -> Any:
    """The split of a data set, memory-mapped."""
    import datasets  # takes seconds, and most data is files

    name, split = str(source.dataset), source.split or DEFAULT_SPLIT
    if Path(name).expanduser().is_dir():
        name = str(Path(name).expanduser())
    saved = any((Path(name) / f).is_file() for f in ("state.json", "dataset_dict.json"))
    try:
        if saved:
            loaded = datasets.load_from_disk(name)
            if isinstance(loaded, datasets.DatasetDict):
                if split not in loaded:
                    raise SourceError(f"{name} has no split {split!r}; it has {', '.join(loaded)}")
                loaded = loaded[split]
            return loaded
        return datasets.load_dataset(name, source.config, revision=source.revision, split=split)
    except (OSError, ValueError, pa.ArrowException, datasets.exceptions.DatasetsError) as e:
        raise SourceError(
            f"the data set {name} (split {split}, revision {source.revision or 'newest'}) cannot be loaded: "
            f"{type(e).__name__}: {e}"
        ) from e


def without_nulls(value: Any) -> Any:
    """A row of a table without its null fields: a table gives each row the fields of all rows."""
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
