"""Algorithm 3: m = k_max - 8; blocks inside the window kept, blocks outside quantized again half by half."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.casting.rows import HALF, MAGNITUDES, Bools, Piece
from halfbyte.casting.verbatim import keep
from halfbyte.casting.window import HIGHEST, LOWEST
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import encode, encode_magnitude
from halfbyte.formats import E2M1, E4M3


def outside(piece: Piece, m: int) -> Bools:
    """(rows, halves): NVFP4 blocks that are not zero and whose 2**(k - m) E4M3 does not hold."""
    n = piece.half_exponents - m
    return ((n < LOWEST) | (n > HIGHEST)) & piece.nonzero_half


def requantize_outside(piece: Piece, m: int) -> tuple[U8, U8]:
    """Blocks inside kept; each half outside gets the scale of its own amax and the nearest codes under it.

    The scale is amax/(6·2^m), rounded to nearest even and kept within [2^-9, 448]; codes round to nearest even.
    """
    codes, scales = keep(piece, m)
    where = outside(piece, m)
    if not where.any():
        return codes, scales
    values: F32 = np.ldexp(E2M1.magnitudes, (piece.half_exponents[where][:, None] - m).astype(np.int32)).astype(
        np.float32
    )
    present = piece.counts[where] > 0
    amax = np.where(present, values, np.float32(0)).max(axis=1, keepdims=True)
    wanted: F32 = np.clip(amax / np.float32(6), np.float32(E4M3.smallest), np.float32(E4M3.max))
    byte = encode(wanted, E4M3)
    # 2^m is left out on both sides: dividing by it is exact but where it would underflow.
    recoded = encode_magnitude(values / E4M3.magnitudes[byte], E2M1)
    scales[where] = byte[:, 0]
    return recode(piece, codes, where, recoded), scales


def recode(piece: Piece, codes: U8, where: Bools, new: U8) -> U8:
    """Replace the magnitudes of the halves in `where` by the table `new` (halves, 8); signs stay."""
    rows = piece.scales.shape[0]
    packed = piece.whole.reshape(rows, -1, HALF // 2)[:, : piece.halves]
    chosen = packed[where]
    low, high = _mapped(chosen & np.uint8(0xF), new), _mapped(chosen >> np.uint8(4), new)
    changed = np.zeros((rows, piece.halves * HALF // 2), np.uint8)
    changed.reshape(rows, piece.halves, HALF // 2)[where] = low | (high << 4)
    touched: npt.NDArray[np.bool_] = np.repeat(where, HALF // 2, axis=1)[:, : codes.shape[1]]
    changed = changed[:, : codes.shape[1]]
    if piece.width % 2:  # keep what stood behind the last element
        changed[:, -1] |= codes[:, -1] & 0xF0
    codes[touched] = changed[touched]
    return codes


def _mapped(nibbles: U8, new: U8) -> U8:
    magnitude = np.take_along_axis(new, (nibbles & 7).astype(np.intp), axis=1)
    return np.asarray((nibbles & 8) | magnitude, np.uint8)


def values_of(exponent: int) -> F32:
    """The eight magnitudes times 2**exponent, as float32 decodes them (Inf beyond its range)."""
    with np.errstate(over="ignore"):
        return np.ldexp(MAGNITUDES, exponent).astype(np.float32)
