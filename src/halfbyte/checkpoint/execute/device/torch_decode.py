"""Values of encoded rows by torch, on any device. The bits are those of `io.decode`: one rounding per product."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from halfbyte.checkpoint.io.decode import RowScales, as_quantized
from halfbyte.checkpoint.io.views import SourceMatrix
from halfbyte.quantize import dequantize

if TYPE_CHECKING:
    import torch


def decode(source: SourceMatrix, raw: torch.Tensor, scales: torch.Tensor, rows: RowScales, out: torch.Tensor) -> None:
    """Decode rows into `out`, a float32 matrix. `raw` and `scales` are bytes; `rows` says what the scales are."""
    import torch

    height = len(out)
    if source.kind == "fp8":
        out.copy_(raw.view(torch.float8_e4m3fn).view(out.shape))
        _multiply(out, scales.view(torch.float32).view(rows.array.shape), rows)
    elif source.kind == "int4":
        pairs, codes = out.view(height, -1, 2), raw.view(height, -1)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        low.copy_(codes)  # in float32, where whole numbers are exact and no other memory is needed
        high.copy_(low).div_(16).floor_()
        low.sub_(high, alpha=16)
        out.sub_(8)
        _multiply(out, scales.view(torch.float32).view(rows.array.shape), rows)
    else:
        q = as_quantized(source, raw.view(height, -1), scales.view(rows.array.shape), rows.stored)
        dequantize(q, np.float32, out=out)


def _multiply(out: torch.Tensor, scales: torch.Tensor, rows: RowScales) -> None:
    """Multiply each element by the scale of its block. The first rows and the last columns may be of partial blocks."""
    height = len(out)
    if rows.tall == 1:
        _multiply_rows(out, scales, rows.wide)
        return
    start = 0
    for number in range(len(scales)):
        stop = min(height, (number + 1) * rows.tall - rows.first)
        _multiply_rows(out[start:stop], scales[number : number + 1], rows.wide)
        start = stop


def _multiply_rows(out: torch.Tensor, scales: torch.Tensor, wide: int) -> None:
    """Rows with a row of scales each, or one row of scales for all."""
    whole = out.shape[1] // wide
    if whole:
        out[:, : whole * wide].view(len(out), whole, wide).mul_(scales[:, :whole, None])
    if whole * wide < out.shape[1]:
        out[:, whole * wide :].mul_(scales[:, whole:])
