"""Inputs that many tests share."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
U8 = npt.NDArray[np.uint8]

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values of the positive codes in order, copied from the specification and not taken from halfbyte."""

FLOAT8: dict[str, Any] = {"e4m3": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu}


def f32(*values: float) -> F32:
    """A float32 vector of these numbers."""
    return np.array(values, dtype=np.float32)


def u8(*values: int) -> U8:
    """A vector of these bytes."""
    return np.array(values, dtype=np.uint8)


def every_bf16() -> F32:
    """All 65536 bfloat16 numbers as float32, including both zeros, subnormals, Inf and every NaN."""
    return (np.arange(65536, dtype=np.uint32) << 16).view(np.float32)


def above(x: F32) -> F32:
    """The next float32 towards +Inf."""
    return np.nextafter(x, np.float32(np.inf)).astype(np.float32)


def below(x: F32) -> F32:
    """The next float32 towards -Inf."""
    return np.nextafter(x, np.float32(-np.inf)).astype(np.float32)


def gaussian(*shape: int, seed: int = 0) -> F32:
    """Normal numbers from a fixed seed."""
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def codes_of(packed: U8) -> U8:
    """4-bit codes from bytes, even element in the low nibble. It does not use halfbyte's own unpacking."""
    return np.stack([packed % 16, packed // 16], axis=-1).reshape(*packed.shape[:-1], -1).astype(np.uint8)


def e2m1(codes: U8) -> F32:
    """Values of E2M1 codes by the table above, with the sign of zero."""
    magnitude = np.array(E2M1_VALUES, np.float32)[codes & 7]
    return np.asarray(np.where(codes & 8, -magnitude, magnitude), np.float32)


def float8(codes: U8, name: str) -> F32:
    """Values of scale bytes by ml_dtypes."""
    return np.asarray(codes.view(FLOAT8[name]), np.float32)
