"""Floats as integers: exact widening, rounding to a narrower dtype, exponent fields."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]
I32 = npt.NDArray[np.int32]

BFLOAT16: np.dtype[np.generic] = np.dtype(ml_dtypes.bfloat16)
DTYPES: dict[str, np.dtype[np.generic]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": BFLOAT16,
}
"""The dtypes that a tensor may have, by the short names used in the conformance vectors."""

FLOAT32_MAX = np.float32(np.finfo(np.float32).max)


def dtype_name(dtype: object) -> str:
    """Short name (fp32, fp16, bf16) of a dtype that can be quantized. Any other dtype raises."""
    for name, known in DTYPES.items():
        if dtype == known:
            return name
    raise InputError(
        f"cannot quantize dtype {dtype}: give float32, float16 or bfloat16, or convert it to one of them first"
    )


@np.errstate(invalid="ignore")  # a signalling NaN becomes a quiet one
def widen(x: npt.NDArray[np.generic]) -> F32:
    """Float16, bfloat16 or float32 as float32. Exact; subnormals, -0.0, Inf and NaN are kept."""
    return np.asarray(x, dtype=np.float32)


def round_to(x: F32, name: str) -> F32:
    """Round to the dtype of that short name (nearest, ties to even) and widen again.

    Overflow gives Inf, as in IEEE. This is what PyTorch's CPU kernels do after each operation on 16-bit tensors.
    """
    return x if name == "fp32" else x.astype(DTYPES[name]).astype(np.float32)


def smallest_normal(name: str) -> np.float32:
    """Smallest positive normal number of the dtype of that short name."""
    return np.float32(2.0**-14 if name == "fp16" else 2.0**-126)


def exponent_field(x: F32) -> I32:
    """Biased exponent field of float32 values, 0 to 255 (sign ignored)."""
    return ((x.view(np.int32) >> 23) & 0xFF).astype(np.int32)


def mantissa_field(x: F32) -> I32:
    """The 23 mantissa bits of float32 values."""
    return (x.view(np.int32) & 0x7FFFFF).astype(np.int32)


def from_bits(bits: I32) -> F32:
    """Float32 values from their bit patterns."""
    return bits.astype(np.int32).view(np.float32)


def log2_float32(x: F32) -> F32:
    """log2 rounded to float32. Within a few units in the last place of a power of two it is already an integer.

    The exponent rules of several peers take its ceiling or floor. A test of the mantissa bits would not be equivalent.
    """
    return np.log2(x.astype(np.float64)).astype(np.float32)


def power_of_two(exponent: I32) -> F32:
    """2**exponent in float32: subnormal below -126, 0 below -149, Inf above 127."""
    return np.ldexp(np.float32(1), exponent).astype(np.float32)


def drop_mantissa_after_quarter(x: F32, name: str) -> F32:
    """Add a quarter of the mantissa's range to the bits of a positive number, then clear the mantissa.

    This works on the bits of the dtype with that short name. From 1.75·2**k on the result is 2**(k + 1); in the top
    binade the carry gives Inf.
    """
    dtype = DTYPES[name]
    integer = np.dtype(f"i{dtype.itemsize}")
    mantissa_bits = {"fp32": 23, "fp16": 10, "bf16": 7}[name]
    bits = x.astype(dtype).view(integer).astype(np.int64) + (1 << (mantissa_bits - 2))
    return (bits >> mantissa_bits << mantissa_bits).astype(integer).view(dtype).astype(np.float32)
