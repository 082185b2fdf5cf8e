"""The table of tokenized samples: one Arrow file on disk, read through a memory map.

The tokenizer writes it, the plan reads its key and length columns, the engine its token ids and the store its
masks and source ids; no room holds all samples in memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA = pa.schema(
    [
        ("source_id", pa.string()),
        ("key", pa.string()),
        ("num_tokens", pa.int32()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
    ]
)


@dataclass(frozen=True, eq=False)
class Sample:
    """One tokenized conversation."""

    source_id: str
    """Id of the conversation in the user's data."""
    key: str
    input_ids: npt.NDArray[np.int32]
    """[T]"""
    loss_mask: npt.NDArray[np.bool_]
    """[T], true where a trainer supervises the token."""

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


class SampleTable:
    """Random access to the samples of a table file, by row."""

    def __init__(self, path: Path, nameless: frozenset[int] | None = None) -> None:
        """``nameless``: see there; found in the table itself unless it is a part of another one."""
        self.path = path
        self._nameless = nameless
        with pa.memory_map(str(path)) as source:
            self._table = pa.ipc.open_file(source).read_all()

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, row: int) -> Sample:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        columns = self._table.slice(row, 1)
        return Sample(
            source_id=columns["source_id"][0].as_py(),
            key=columns["key"][0].as_py(),
            input_ids=columns["input_ids"][0].values.to_numpy(zero_copy_only=True),
            loss_mask=columns["loss_mask"][0].values.to_numpy(zero_copy_only=False),
        )

    @property
    def keys(self) -> list[str]:
        return list(self._table["key"].to_pylist())

    @property
    def nameless(self) -> frozenset[int]:
        """Rows whose id a later row of other tokens or with another loss mask has, too: the id names that one."""
        if self._nameless is None:
            ids, keys = self._table["source_id"].to_pylist(), self.keys
            last = {source_id: row for row, source_id in enumerate(ids)}
            self._nameless = frozenset(
                row
                for row, named in enumerate(map(last.__getitem__, ids))
                if row != named
                and (keys[row] != keys[named] or not np.array_equal(self[row].loss_mask, self[named].loss_mask))
            )
        return self._nameless

    @property
    def num_tokens(self) -> npt.NDArray[np.int32]:
        """[rows], the length of each sample."""
        return np.asarray(self._table["num_tokens"].to_numpy(), dtype=np.int32)


class SampleTableWriter:
    """Writes a table row batch by row batch; the file is complete when the context ends without an error."""

    def __init__(self, path: Path, rows_per_batch: int = 256) -> None:
        self._path = path
        self._rows_per_batch = rows_per_batch
        self._rows: list[Sample] = []

    def __enter__(self) -> "SampleTableWriter":
        self._file = pa.OSFile(str(self._path), "wb")
        self._writer = pa.ipc.new_file(self._file, SCHEMA)
        return self

    def add(self, samples: Iterable[Sample]) -> None:
        for sample in samples:
            self._rows.append(sample)
            if len(self._rows) >= self._rows_per_batch:
                self._flush()

    def _flush(self) -> None:
        if self._rows:
            columns = [
                [s.source_id for s in self._rows],
                [s.key for s in self._rows],
                [s.num_tokens for s in self._rows],
                [s.input_ids for s in self._rows],
                [s.loss_mask for s in self._rows],
            ]
            arrays = [pa.array(c, type=f.type) for c, f in zip(columns, SCHEMA, strict=True)]
            self._writer.write_batch(pa.record_batch(arrays, schema=SCHEMA))
            self._rows.clear()

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc_type is None:
            self._flush()
        self._writer.close()
        self._file.close()
