"""Algorithm 3: m = k_max - 8; blocks inside the window kept, blocks outside quantized again half by half."""

from __future__ import annotations

import numpy as np

from halfbyte.casting.rows import Rows
from halfbyte.casting.verbatim import keep
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import encode, encode_magnitude
from halfbyte.formats import E2M1, E4M3


def requantize_outside(rows: Rows, m: int, backend: str = "auto", threads: int | None = None) -> tuple[U8, U8]:
    """Blocks inside kept; each half outside gets the scale of its own amax and the nearest codes under it.

    The scale is amax/(6·2^m), rounded to nearest even and kept within [2^-9, 448]; codes round to nearest even.
    """
    codes, scales = keep(rows, m, backend=backend, threads=threads)
    for start, stop, part in rows.slices():
        where = part.outside(m)
        if not where.any():
            continue
        exponents = (part.half_exponents[where][:, None] - m).astype(np.int32)
        values: F32 = np.ldexp(E2M1.magnitudes, exponents).astype(np.float32)
        present = part.counts[where] > 0
        amax = np.where(present, values, np.float32(0)).max(axis=1, keepdims=True)
        wanted: F32 = np.clip(amax / np.float32(6), np.float32(E4M3.smallest), np.float32(E4M3.max))
        byte = encode(wanted, E4M3)
        # 2^m is left out on both sides: dividing by it is exact but where it would underflow.
        recoded = encode_magnitude(values / E4M3.magnitudes[byte], E2M1)
        scales[start:stop][where] = byte[:, 0]
        part.recode(codes[start:stop], where, recoded)
    return codes, scales
