"""The 128x4 scale tile that Blackwell's matrix units read, both ways.

Scale (r, c) of an R×C matrix, R padded to 128 and C to 4 with zeros, goes to byte
((r div 128)·(C/4) + c div 4)·512 + (r mod 32)·16 + ((r mod 128) div 32)·4 + c mod 4.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import U8
from halfbyte.errors import InputError

ROWS, COLUMNS = 128, 4


def swizzle(scales: U8) -> U8:
    """A (rows, columns) matrix of scale bytes as flat bytes in tile order, padded with zeros to whole tiles."""
    if scales.ndim != 2:
        raise InputError(f"scales of shape {scales.shape}: swizzle takes a (rows, columns) matrix; give one at a time")
    rows, columns = scales.shape
    padded = np.pad(scales, [(0, -rows % ROWS), (0, -columns % COLUMNS)])
    tiles = padded.reshape(
        -1, 4, 32, padded.shape[1] // COLUMNS, COLUMNS
    )  # row tile, quarter, row, column tile, column
    return tiles.transpose(0, 3, 2, 1, 4).reshape(-1)


def unswizzle(flat: U8, shape: tuple[int, int]) -> U8:
    """The (rows, columns) matrix that `swizzle` made the flat bytes from."""
    if len(shape) != 2:
        raise InputError(f"shape {shape}: swizzled scales are those of a (rows, columns) matrix")
    rows, columns = shape
    row_tiles, column_tiles = -(-rows // ROWS), -(-columns // COLUMNS)
    needed = row_tiles * column_tiles * ROWS * COLUMNS
    if flat.size != needed:
        raise InputError(f"swizzled scales of a {rows}x{columns} matrix take {needed} bytes, got {flat.size}")
    tiles = flat.reshape(row_tiles, column_tiles, 32, 4, COLUMNS).transpose(0, 3, 2, 1, 4)
    return tiles.reshape(row_tiles * ROWS, column_tiles * COLUMNS)[:rows, :columns]
