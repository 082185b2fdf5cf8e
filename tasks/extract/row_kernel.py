"""One pass over a row on the GPU gives its digest, its sum of squares, and what is wrong with it.

The plain torch form in :mod:`tasks.extract.assemble` reads and writes every element a dozen times over; at the speed
of prefill that costs some percent of the engine's throughput, this a few thousandths.
"""

from typing import Any

import torch
import triton
import triton.language as tl

BLOCK = 1024
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _row(  # type: ignore[no-untyped-def]
    bits_ptr, weights_ptr, digests_ptr, squares_ptr, nonfinite_ptr, zero_ptr, columns, stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    digest = tl.zeros([BLOCK], tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    nonfinite = tl.zeros([BLOCK], tl.int32)
    nonzero = tl.zeros([BLOCK], tl.int32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        bits = tl.load(bits_ptr + row * stride + column, mask=inside, other=0)
        weights = tl.load(weights_ptr + column, mask=inside, other=0)
        digest += bits.to(tl.int64) * weights
        # bfloat16 is the upper half of float32
        wide = (bits.to(tl.int32) << 16) if WIDTH == 2 else bits
        value = wide.to(tl.float32, bitcast=True)
        squares += value * value
        nonfinite += tl.where(tl.abs(value) <= LARGEST, 0, 1)  # a comparison with NaN is false
        nonzero += tl.where(value == 0.0, 0, 1)
    tl.store(digests_ptr + row, tl.sum(digest, axis=0))
    tl.store(squares_ptr + row, tl.sum(squares, axis=0))
    tl.store(nonfinite_ptr + row, tl.sum(nonfinite, axis=0))
    tl.store(zero_ptr + row, (tl.sum(nonzero, axis=0) == 0).to(tl.int8))


def examine_rows(rows_NH: torch.Tensor, weights_H: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Digest int64 [N], sum of squares float64 [N], elements not finite int32 [N] and all-zero bool [N] of each row.

    Args:
        rows_NH: bfloat16 or float32 [N, H] on a GPU; elements of a row adjacent.
        weights_H: int64 [H], see :func:`tasks.digest.column_weights`.
    """
    num_rows, columns = rows_NH.shape
    like: dict[str, Any] = {"device": rows_NH.device}
    digests = torch.empty(num_rows, dtype=torch.int64, **like)
    squares = torch.empty(num_rows, dtype=torch.float32, **like)
    nonfinite = torch.empty(num_rows, dtype=torch.int32, **like)
    zero = torch.empty(num_rows, dtype=torch.int8, **like)
    width = rows_NH.element_size()
    bits = rows_NH.view(torch.int16 if width == 2 else torch.int32)
    _row[(num_rows,)](
        bits, weights_H, digests, squares, nonfinite, zero, columns, rows_NH.stride(0), WIDTH=width, BLOCK=BLOCK
    )
    return digests, squares.double(), nonfinite, zero.bool()
