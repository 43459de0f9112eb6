"""Sums on a GPU that have the bits of numpy's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.operand import on_device

if TYPE_CHECKING:
    import torch

COLUMNS, UNROLLED = 32, 8


def squared_differences(x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """Σ over rows of (y − x)², times a float64 weight per row: (K,) float64, of contiguous float32 (rows, K)."""
    import torch

    from halfbyte.backends.gpu.triton.sums import sum_squares

    rows, columns = x.shape
    out = torch.empty(columns, dtype=torch.float64, device=x.device)
    with on_device(x):
        sum_squares[(-(-columns // COLUMNS),)](
            x, y, out if weights is None else weights, out, rows, columns, C=COLUMNS, U=UNROLLED,
            WEIGHTED=weights is not None, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
