"""Block data that moves without being quantized: MXFP4 blocks under an NVFP4 scale, stored words."""

from __future__ import annotations

import numpy as np

from halfbyte.checkpoint.buffers import Arena
from halfbyte.checkpoint.matrix import Files, View, read_rows
from halfbyte.codec.bits import U8
from halfbyte.codec.element import decode, encode
from halfbyte.errors import CheckpointError
from halfbyte.formats import E2M1, E4M3


def stored_word(files: Files, view: View | None, module: str) -> np.float32:
    """A scalar as the source stores it."""
    if view is None:
        raise CheckpointError(f"{module} has no stored scale where one is needed")
    return np.float32(read_rows(files, view, 0, 1, Arena(256)).astype(np.float32)[0, 0])


def cast_rows(codes: U8, scales: U8, largest: int) -> tuple[U8, U8]:
    """MXFP4 rows as NVFP4 rows under the tensor scale 2**(largest − 8).

    Codes stay; each block of 32 becomes two of 16 with a power of two as scale. A block more than 17 binades below the
    largest takes the smallest scale, 2**-9, and its codes are rounded to it, ties to even.
    """
    exponent = scales.astype(np.int32) - 127 - largest + 8
    low = np.maximum(exponent, -9)
    table = np.array([int(encode(np.array([2.0**power], np.float32), E4M3)[0]) for power in range(-9, 9)], np.uint8)
    out = np.repeat(table[np.minimum(low, 8) + 9], 2, axis=-1)
    shift = low - exponent
    if not shift.any():
        return codes, out
    moved = codes.reshape(*scales.shape, 16).copy()
    magnitudes = decode(np.arange(16, dtype=np.uint8), E2M1)
    for amount in np.unique(shift[shift > 0]):
        values = np.ldexp(magnitudes, -int(min(amount, 60))).astype(np.float32)
        nibble = encode(values, E2M1) & 7 | np.arange(16, dtype=np.uint8) & 8
        pairs = (nibble[None, :] | nibble[:, None] << 4).reshape(-1).astype(np.uint8)
        where = shift == amount
        moved[where] = pairs[moved[where]]
    return moved.reshape(codes.shape), out
