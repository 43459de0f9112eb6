"""gguf's Python package: MXFP4 both ways, NVFP4 decoding, and its float to E4M3 function.

MXFP4: if the amax of a block is below 2**-125, its exponent wraps and the block decodes to enormous values. The code is
the first index of the smallest |half scale · k − x| over the doubled values k. So ties go to the smaller magnitude, and
every zero is code 0. `halfbyte.layouts.gguf` has the order of nibbles and bytes in a GGUF block.
"""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import exponents
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.spec import Contract, DecodeRule, MXRule, Rounding
from halfbyte.formats.elements import E2M1, E4M3

DOUBLED = (2 * E2M1.values).astype(np.float32)  # 0, 1, 2, 3, 4, 6, 8, 12 and negatives

# E4M3 without NaN and sign, except that 0x7F decodes to 0. The sign bit is dropped after that test, so 0xFF is 480.
_magnitudes = np.append(E4M3.magnitudes, np.float32(480))
SCALE_VALUES = np.concatenate([_magnitudes, _magnitudes])
SCALE_VALUES[0x7F] = 0


def first_nearest(x: F32, scale: F32) -> U8:
    """first index of the smallest |(S/2)·k − x| over k = 2q"""
    half = scale * np.float32(0.5)
    distance = np.abs(half[..., None] * DOUBLED - x[..., None])
    return np.asarray(np.argmin(distance, axis=-1), np.uint8)


def decode_scale_halved(q: F32, byte: U8) -> F32:
    """(S/2)·2q, 0x00 and 0x7F are 0, sign ignored"""
    return (SCALE_VALUES[byte] * np.float32(0.5)) * (q * np.float32(2))


def scale_from_float(x: F32) -> U8:
    """gguf's float to unsigned E4M3. Half-way cases round up, but no number below 2**-6 rounds up to 2**-6.

    From 248 on, and for NaN, the result is 448.
    """
    positive = np.clip(np.nan_to_num(x, nan=448, posinf=448), np.float32(2.0**-149), np.float32(448))
    subnormal = np.minimum(np.floor(positive * np.float32(512) + np.float32(0.5)), 7)
    mantissa, exponent = np.frexp(positive)
    field = exponent - 1 + 7
    steps = np.floor((mantissa.astype(np.float64) * 2 - 1) * 8 + 0.5).astype(np.int64)
    carried = steps == 8
    field, steps = field + carried, np.where(carried, 0, steps)
    normal = np.where(field >= 15, 0x7E, (field << 3) | steps)
    byte = np.where(positive < np.float32(2.0**-6), subnormal, normal)
    return np.where(x <= 0, 0, byte).astype(np.uint8)


MX = MXRule(
    scale=exponents.floor_log2_wrapping,
    element=exponents.over,
    rounding=Rounding(tie="down"),
    nearest=first_nearest,
    decode=exponents.decode_power,
    negative_zero=False,
    blocks=(32,),
)

MODES = {
    "mxfp4": ("mxfp4",),
    "nvfp4 dequantize (the package has no NVFP4 quantizer)": ("nvfp4",),
    "NVFP4.fp32_to_ue4m3": ("nvfp4",),
}


@choices(mode=MODES)
@listing_options
def gguf(*, mode: str | None = None) -> Contract:
    """gguf's Python package: MXFP4 both ways, and decoding of NVFP4. `mode` only restricts the contract to one."""
    check_name("mode of gguf", mode, MODES)
    rules: dict[str, MXRule | DecodeRule] = {
        "mxfp4": MX,
        "nvfp4": DecodeRule(decode=decode_scale_halved, negative_zero=False),
    }
    return Contract(
        name="gguf",
        source="gguf 0.19.0",
        rules={name: rule for name, rule in rules.items() if mode is None or name in MODES[mode]},
        options=changed(gguf, {"mode": mode}),
    )
