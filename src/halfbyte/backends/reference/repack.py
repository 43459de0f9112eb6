"""The numpy definition of what the byte-moving kernels do."""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import U8


def cast_blocks(codes: U8, scales: U8, table: U8, out: tuple[U8, U8]) -> int:
    """MXFP4 codes (blocks, 16) and scales (blocks,) into NVFP4 codes and scales (blocks, 2); how many blocks are zero.

    table: the E4M3 byte that stands for each E8M0 byte.
    """
    np.copyto(out[0], codes)
    np.copyto(out[1], table[scales][:, None])
    return int(((codes & np.uint8(0x77)) == 0).all(axis=1).sum())
