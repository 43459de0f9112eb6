"""Sums over rows in float64, the rows taken in order, so that the bits are those of numpy."""

import triton
import triton.language as tl


@triton.jit
def sum_squares(
    x_ptr, y_ptr, weight_ptr, out_ptr, rows, columns, C: tl.constexpr, U: tl.constexpr, WEIGHTED: tl.constexpr
):  # fmt: skip
    """out[c] = Σ_r (y[r, c] − x[r, c])²·weight[r]: the difference in float32, all else in float64."""
    c = tl.program_id(0) * C + tl.arange(0, C)
    exists = c < columns
    found = tl.zeros((C,), tl.float64)
    x, y = x_ptr + c, y_ptr + c
    for first in range(0, rows, U):
        for i in tl.static_range(U):
            left = rows - first - i
            there = exists & (left + c * 0 > 0)
            lost = tl.load(y + i * columns, mask=there, other=0.0) - tl.load(x + i * columns, mask=there, other=0.0)
            square = lost.to(tl.float64) * lost.to(tl.float64)
            if WEIGHTED:
                square = square * tl.load(weight_ptr + first + i + c * 0, mask=there, other=0.0)
            found = found + square
        x += U * columns
        y += U * columns
    tl.store(out_ptr + c, found, mask=exists)
