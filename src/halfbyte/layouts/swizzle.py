"""The 128x4 scale tile that Blackwell's matrix units read, both ways.

Scale (r, c) of an R×C matrix, R padded to 128 and C to 4 with zeros, goes to byte
((r div 128)·(C/4) + c div 4)·512 + (r mod 32)·16 + ((r mod 128) div 32)·4 + c mod 4.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np

from halfbyte.errors import InputError

B = TypeVar("B")
"""uint8, numpy or torch."""

ROWS, COLUMNS = 128, 4


def swizzle(scales: B) -> B:
    """Scale bytes (..., rows, columns) as bytes in tile order, padded with zeros to whole tiles.

    A matrix gives flat bytes; with axes before the rows, each matrix has its own: (..., bytes). A torch tensor gives
    one on its device, a numpy array gives a numpy array.

    >>> import torch
    >>> swizzle(torch.ones(2, 200, 3, dtype=torch.uint8)).shape
    torch.Size([2, 1024])
    """
    given: Any = scales
    if not (isinstance(given, np.ndarray) or hasattr(given, "new_zeros")):
        raise InputError(f"scales must be a numpy array or a torch tensor, not {type(given).__name__}")
    if given.ndim < 2:
        raise InputError(f"scales of shape {tuple(given.shape)}: swizzle takes (rows, columns) matrices")
    *leading, rows, columns = given.shape
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    size = (*leading, row_tiles * ROWS, column_tiles * COLUMNS)
    padded = np.zeros(size, given.dtype) if isinstance(given, np.ndarray) else given.new_zeros(size)
    padded[..., :rows, :columns] = given
    tiles = padded.reshape(*leading, row_tiles, 4, 32, column_tiles, COLUMNS)
    swizzled: B = _turned(tiles, len(leading)).reshape(*leading, row_tiles * column_tiles * ROWS * COLUMNS)
    return swizzled


def unswizzle(flat: B, shape: tuple[int, ...]) -> B:
    """The (..., rows, columns) scales that `swizzle` made the bytes from.

    flat: the bytes, in any shape that has as many.
    """
    given: Any = flat
    if len(shape) < 2:
        raise InputError(f"shape {shape}: swizzled scales are those of (rows, columns) matrices")
    *leading, rows, columns = shape
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    needed = math.prod(leading) * row_tiles * column_tiles * ROWS * COLUMNS
    count = math.prod(given.shape)
    if count != needed:
        matrices = f"{math.prod(leading)} matrices of {rows}x{columns}" if leading else f"a {rows}x{columns} matrix"
        raise InputError(f"swizzled scales of {matrices} take {needed} bytes, got {count}")
    tiles = given.reshape(*leading, row_tiles, column_tiles, 32, 4, COLUMNS)
    whole = _turned(tiles, len(leading)).reshape(*leading, row_tiles * ROWS, column_tiles * COLUMNS)
    found: B = whole[..., :rows, :columns]
    return found


def _turned(tiles: Any, leading: int) -> Any:
    """Tiles with (row tile, quarter, row, column tile) in the order (row tile, column tile, row, quarter), or back."""
    order = (*range(leading), *(leading + axis for axis in (0, 3, 2, 1, 4)))
    return tiles.transpose(order) if isinstance(tiles, np.ndarray) else tiles.permute(order)
