"""A peer's own cast, slot by slot: the global scale and block amaxes of its closed form, then its NVFP4 rule."""

from __future__ import annotations

import numpy as np

from halfbyte.casting.rows import Rows
from halfbyte.casting.scales import nvfp4_rule
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.codec.blocks import join, split
from halfbyte.codec.element import decode
from halfbyte.codec.pack import pack
from halfbyte.contracts import Contract
from halfbyte.contracts.arithmetic import scale_byte
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import CastRule, TensorScale
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3, get_format
from halfbyte.methods import Amax


@np.errstate(over="ignore")  # 6·2^127 is Inf, in the peer too
def closed_form_amax(rows: Rows, rule: CastRule) -> F32:
    """(rows, blocks): the amax that the peer makes a block's scale from."""
    if rule.block_amax is None:
        raise UnsupportedError("this cast has no closed form: it goes through bfloat16")
    return rule.block_amax(E2M1.magnitudes[rows.largest], rows.scales)


@np.errstate(all="ignore")
def cast_by_rule(rows: Rows, values: F32, contract: Contract, rule: CastRule, k_max: int) -> tuple[U8, U8, np.float32]:
    """Codes, scales and global scale of the peer's closed form; `values` are the rows as bfloat16 decodes them."""
    if rule.factor is None:
        raise UnsupportedError("this cast has no closed form: it goes through bfloat16")
    nvfp4, format = nvfp4_rule(contract), get_format("nvfp4")
    factor = rule.factor(k_max).reshape(1, 1, 1)
    top = nvfp4.anchor(Amax())
    t = TensorScale(factor * top, factor, np.float32(nvfp4.element_max), top, "fp32")
    amax = np.repeat(closed_form_amax(rows, rule), rows.block // format.block, axis=1)[:, : rows.halves, None]
    # Kept within E4M3 before it is rounded: no saturation, and no rule for zero.
    wanted = np.clip(nvfp4.pre_scale(amax, t), np.float32(nvfp4.scale_byte.smallest), np.float32(E4M3.max))
    byte = scale_byte(wanted, nvfp4.scale_byte)
    codes = WITHOUT_NEGATIVE_ZERO[rows.codes]
    # Where the scale came out as 2^k the codes come back; only the other blocks have to be rounded.
    again = np.ldexp(np.float32(1), rows.half_exponents.astype(np.int32))[..., None] != decode(byte, E4M3) * factor
    again = again[..., 0]
    if again.any():
        blocks = split(widen(values), format.block)[again][:, None]
        y = nvfp4.element(blocks, decode(byte[again], E4M3)[:, None], t)
        rounded = np.zeros((*again.shape, format.block), np.uint8)
        rounded[again] = round_elements(blocks, y, E2M1, nvfp4.rounding)[0][:, 0]
        touched = np.repeat(again, format.block // 2, axis=1)[:, : codes.shape[1]]
        packed = pack(join(rounded, values.shape), format)
        codes = np.where(touched, packed, codes)
    return codes, byte[..., 0], np.float32(factor.reshape(()))


def _without_negative_zero() -> U8:
    """For each byte of two codes: 8 replaced by 0."""
    byte = np.arange(256, dtype=np.uint8)
    low, high = byte & 0xF, byte >> 4
    return np.asarray(np.where(low == 8, 0, low) | (np.where(high == 8, 0, high) << 4), np.uint8)


WITHOUT_NEGATIVE_ZERO = _without_negative_zero()
