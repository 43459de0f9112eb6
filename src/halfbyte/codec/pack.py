"""Pack codes into bytes: two 4-bit codes per byte, the even element in the low nibble. 8-bit codes stay as they are."""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import U8
from halfbyte.formats.spec import BlockFormat


def packed_width(width: int, format: BlockFormat) -> int:
    """Bytes per row of `width` codes, rounded up: an odd row of 4-bit codes uses half of its last byte."""
    return -(-width // format.codes_per_byte)


def pack(codes: U8, format: BlockFormat) -> U8:
    """Pack along the last axis. An odd row gets a zero in the last high nibble."""
    if format.codes_per_byte == 1:
        return codes
    if codes.shape[-1] % 2:
        codes = np.concatenate([codes, np.zeros_like(codes[..., :1])], axis=-1)
    return (codes[..., 0::2] | (codes[..., 1::2] << 4)).astype(np.uint8)


def unpack(packed: U8, width: int, format: BlockFormat) -> U8:
    """The first `width` codes of each row: the inverse of `pack`."""
    if format.codes_per_byte == 1:
        return packed
    codes = np.empty((*packed.shape[:-1], 2 * packed.shape[-1]), dtype=np.uint8)
    codes[..., 0::2] = packed & 0xF
    codes[..., 1::2] = packed >> 4
    return codes[..., :width]
