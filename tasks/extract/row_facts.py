"""What is known of rows beside their states, in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_UNKNOWN = 0xFF  # all bits set: NaN, or -1


class _Field(NamedTuple):
    dtype: type[np.generic]
    by_depth: bool = True
    at_first: int = 0
    """What every byte is of a row that nothing was said of."""


_FIELDS = (
    _Field(np.int64),
    _Field(np.float64, at_first=_UNKNOWN),
    _Field(np.int32),
    _Field(np.bool_),
    _Field(np.bool_),
    _Field(np.int32, by_depth=False, at_first=_UNKNOWN),
)


def layout(num_rows: int, num_depths: int) -> list[tuple[type[np.generic], tuple[int, ...]]]:
    """Element type and shape of each of the facts, in their order."""
    return [(each.dtype, (num_rows, num_depths) if each.by_depth else (num_rows,)) for each in _FIELDS]


@dataclass(frozen=True)
class RowFacts:
    """Per row and depth, what the device said of it; the fields of :class:`tasks.extract.assemble.RowSummary`.

    All is contiguous. Rows are put from one place to another as plain bytes: while numpy indexes by an array, or
    copies much, it gives up the interpreter's lock, for which some dozen threads wait that encode, and a step has some
    hundred such copies, one after another.
    """

    digests_NL: npt.NDArray[np.int64]
    squares_NL: npt.NDArray[np.float64]
    nonfinite_NL: npt.NDArray[np.int32]
    zero_NL: npt.NDArray[np.bool_]
    unlike_NL: npt.NDArray[np.bool_]
    input_ids_N: npt.NDArray[np.int32]
    _columns: tuple[tuple[memoryview, int], ...] = field(init=False, repr=False, compare=False)
    """Bytes of each array, and how many of them are one row's."""

    def __post_init__(self) -> None:
        columns = tuple((a.reshape(-1).view(np.uint8).data, a[:1].nbytes) for a in self._arrays())
        object.__setattr__(self, "_columns", columns)

    def _arrays(self) -> Iterator[npt.NDArray[np.generic]]:
        return (getattr(self, each.name) for each in fields(self) if each.init)

    @classmethod
    def empty(cls, num_rows: int, num_depths: int) -> "RowFacts":
        """Room for rows, with arbitrary content; memory is taken up only as it is filled."""
        return cls(*(np.empty(shape, dtype) for dtype, shape in layout(num_rows, num_depths)))

    @classmethod
    def unknown(cls, num_rows: int, num_depths: int) -> "RowFacts":
        """Rows of which nothing was said yet: their squares are NaN and their token ids -1."""
        each = zip(layout(num_rows, num_depths), _FIELDS, strict=True)
        return cls(*(_filled(shape, dtype, fact.at_first) for (dtype, shape), fact in each))

    @staticmethod
    def row_bytes(num_depths: int) -> int:
        """Of one row."""
        return sum(np.dtype(dtype).itemsize * prod(shape) for dtype, shape in layout(1, num_depths))

    def put(self, at: int, rows: "RowFacts", start: int, stop: int) -> None:
        """Put rows [start, stop) of another in place of those from ``at`` on."""
        for (here, size), (there, _) in zip(self._columns, rows._columns, strict=True):
            here[at * size : (at + stop - start) * size] = there[start * size : stop * size]


def _filled(shape: tuple[int, ...], dtype: type[np.generic], byte: int) -> npt.NDArray[Any]:
    """An array of which every byte is this one; numpy's own would give up the interpreter's lock."""
    return np.frombuffer(bytearray((byte,)) * (prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)
