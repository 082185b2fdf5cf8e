"""What is known of rows beside their states, in host memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

_NAN_BYTE = _MINUS_ONE_BYTE = 0xFF  # all bits set


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
        shape = (num_rows, num_depths)
        return cls(
            np.empty(shape, np.int64),
            np.empty(shape, np.float64),
            np.empty(shape, np.int32),
            np.empty(shape, np.bool_),
            np.empty(shape, np.bool_),
            np.empty(num_rows, np.int32),
        )

    @classmethod
    def unknown(cls, num_rows: int, num_depths: int) -> "RowFacts":
        """Rows of which nothing was said yet: their squares are NaN and their token ids -1."""
        shape = (num_rows, num_depths)
        return cls(
            _filled(shape, np.int64, 0),
            _filled(shape, np.float64, _NAN_BYTE),
            _filled(shape, np.int32, 0),
            _filled(shape, np.bool_, 0),
            _filled(shape, np.bool_, 0),
            _filled((num_rows,), np.int32, _MINUS_ONE_BYTE),
        )

    @staticmethod
    def row_bytes(num_depths: int) -> int:
        """Of one row."""
        return sum(array.nbytes for array in RowFacts.empty(1, num_depths)._arrays())

    def put(self, at: int, rows: "RowFacts", start: int, stop: int) -> None:
        """Put rows [start, stop) of another in place of those from ``at`` on."""
        for (here, size), (there, _) in zip(self._columns, rows._columns, strict=True):
            here[at * size : (at + stop - start) * size] = there[start * size : stop * size]


def _filled(shape: tuple[int, ...], dtype: type[np.generic], byte: int) -> npt.NDArray[Any]:
    """An array of which every byte is this one; numpy's own would give up the interpreter's lock."""
    return np.frombuffer(bytearray((byte,)) * (prod(shape) * np.dtype(dtype).itemsize), dtype).reshape(shape)
