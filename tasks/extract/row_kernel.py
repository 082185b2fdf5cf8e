"""One pass over a row on the GPU gives its digest, its sum of squares, and what is wrong with it.

The plain torch form in :mod:`tasks.extract.assemble` reads and writes every element a dozen times over; at the speed
of prefill that costs some percent of the engine's throughput, this a few thousandths.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from tasks import digest

BLOCK = 512
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _row(  # type: ignore[no-untyped-def]
    bits_ptr, weights_ptr, digests_ptr, squares_ptr, nonfinite_ptr, zero_ptr, rows, columns, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.zeros([BLOCK], tl.int32)
    second = tl.zeros([BLOCK], tl.int32)
    squares = tl.zeros([BLOCK], tl.float32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        bits = tl.load(bits_ptr + row * stride + column, mask=inside, other=0)
        if WIDTH == 2:
            upper = bits.to(tl.int32)
            first += upper * tl.load(weights_ptr + column, mask=inside, other=0)
            second += upper * tl.load(weights_ptr + columns + column, mask=inside, other=0)
            value = (upper << 16).to(tl.float32, bitcast=True)  # bfloat16 is the upper half of float32
        else:
            lower, upper = (bits << 16) >> 16, bits >> 16
            pair = 2 * column
            first += lower * tl.load(weights_ptr + pair, mask=inside, other=0)
            first += upper * tl.load(weights_ptr + pair + 1, mask=inside, other=0)
            second += lower * tl.load(weights_ptr + 2 * columns + pair, mask=inside, other=0)
            second += upper * tl.load(weights_ptr + 2 * columns + pair + 1, mask=inside, other=0)
            value = bits.to(tl.float32, bitcast=True)
        squares += value * value
        nonfinite += tl.where(tl.abs(value) <= LARGEST, 0, 1)  # a comparison with NaN is false
        nonzero += tl.where(value == 0.0, 0, 1)
    tl.store(digests_ptr + row, tl.sum(first, axis=0))
    tl.store(digests_ptr + rows + row, tl.sum(second, axis=0))
    tl.store(squares_ptr + row, tl.sum(squares, axis=0))
    tl.store(nonfinite_ptr + row, tl.sum(nonfinite, axis=0))
    tl.store(zero_ptr + row, (tl.sum(nonzero, axis=0) == 0).to(tl.int8))


def examine_rows(rows_NH: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Digest int64 [N], sum of squares float64 [N], elements not finite int32 [N] and all-zero bool [N] of each row.

    Args:
        rows_NH: bfloat16 or float32 [N, H] on a GPU; elements of a row adjacent.
        weights: int32 [2, H], or [2, 2H] for float32, see :func:`tasks.digest.column_weights`.
    """
    num_rows, columns = rows_NH.shape
    like: dict[str, Any] = {"device": rows_NH.device}
    digests = torch.empty(2, num_rows, dtype=torch.int32, **like)
    squares = torch.empty(num_rows, dtype=torch.float32, **like)
    nonfinite = torch.empty(num_rows, dtype=torch.int32, **like)
    zero = torch.empty(num_rows, dtype=torch.int8, **like)
    width = rows_NH.element_size()
    bits = rows_NH.view(torch.int16 if width == 2 else torch.int32)
    _row[(num_rows,)](
        bits,
        weights,
        digests,
        squares,
        nonfinite,
        zero,
        num_rows,
        columns,
        rows_NH.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
    )
    return digest.pack(digests[0], digests[1]), squares.double(), nonfinite, zero.bool()
