"""What bytes mean: element formats and block formats, as frozen data with derived facts."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.errors import UnsupportedError


@dataclass(frozen=True, kw_only=True)
class ElementFormat:
    """A small float, described by its bit fields. Everything else (values, maximum, codes) is derived from them."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    """A normal code has the value 2**(exponent field - bias) * 1.mantissa."""
    signed: bool = True
    """The sign is the top bit."""
    has_subnormals: bool = True
    """If True, exponent field 0 holds zero and the subnormals. If False, it is one more binade and there is no zero."""
    has_nan: bool = False
    """The largest magnitude code is NaN. No format here has infinities."""

    @property
    def magnitude_bits(self) -> int:
        return self.exponent_bits + self.mantissa_bits

    @property
    def bits(self) -> int:
        return self.magnitude_bits + self.signed

    @property
    def sign_code(self) -> int:
        """The sign bit as an integer; 0 for an unsigned format."""
        return (1 << self.magnitude_bits) if self.signed else 0

    @property
    def nan_code(self) -> int | None:
        """The NaN code that halfbyte writes: the one with a clear sign bit."""
        return (1 << self.magnitude_bits) - 1 if self.has_nan else None

    @functools.cached_property
    def magnitudes(self) -> npt.NDArray[np.float32]:
        """Values of the non-negative finite codes, ascending; index = code."""
        codes = np.arange((1 << self.magnitude_bits) - self.has_nan)
        field, mantissa = codes >> self.mantissa_bits, codes & ((1 << self.mantissa_bits) - 1)
        subnormal = (field == 0) & self.has_subnormals
        significand = np.where(subnormal, 0, 1 << self.mantissa_bits) + mantissa
        exponent = np.where(subnormal, 1, field) - self.bias - self.mantissa_bits
        # 2**-127 (E8M0 code 0) is a float32 subnormal. ldexp in float64 avoids it; the one cast to float32 is exact.
        values: npt.NDArray[np.float32] = np.ldexp(significand.astype(np.float64), exponent).astype(np.float32)
        return values

    @functools.cached_property
    def values(self) -> npt.NDArray[np.float32]:
        """Value of every code, NaN codes included; index = code."""
        positive = self.magnitudes
        if self.has_nan:
            positive = np.append(positive, np.float32(np.nan))
        return np.concatenate([positive, -positive]) if self.signed else positive

    @property
    def max(self) -> float:
        return float(self.magnitudes[-1])

    @property
    def smallest(self) -> float:
        """The smallest positive value."""
        positive = self.magnitudes[self.magnitudes > 0]
        return float(positive[0])

    @property
    def smallest_normal(self) -> float:
        return float(self.magnitudes[1 << self.mantissa_bits]) if self.has_subnormals else self.smallest

    @property
    def max_exponent(self) -> int:
        """floor(log2(max)), which the OCP scale rule subtracts."""
        return int(np.frexp(self.max)[1]) - 1


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """Blocks of elements that share a scale. NVFP4 adds one float32 scale per tensor."""

    name: str
    element: ElementFormat
    scale: ElementFormat
    block: int
    """Length of a block along the last axis."""
    has_global: bool
    """Whether a float32 scale for the whole tensor (or row) multiplies the block scales."""
    blocks: tuple[int, ...]
    """The block lengths that a caller may ask for."""

    def __post_init__(self) -> None:
        """Refuse formats that do not pack: a byte holds two codes or one code, and one scale."""
        if type(self.block) is not int:
            raise UnsupportedError(f"format {self.name}: the block length is a whole number, not {self.block!r}")
        if not 4 <= self.element.bits <= 8:
            raise UnsupportedError(
                f"format {self.name}: elements of {self.element.bits} bits do not pack; codes of 4 bits are stored two "
                "to a byte, codes of 5 to 8 bits one to a byte"
            )
        if self.scale.bits > 8:
            raise UnsupportedError(f"format {self.name}: a scale of {self.scale.bits} bits does not fit into a byte")
        if self.block < 1 or self.block % self.codes_per_byte:
            raise UnsupportedError(
                f"format {self.name}: blocks of {self.block} elements do not end at a byte; take a positive multiple "
                f"of {self.codes_per_byte}"
            )

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.element.bits

    @property
    def bits_per_element(self) -> float:
        """Bits per element, with its share of the block scale but without the global scale."""
        return 8 / self.codes_per_byte + 8 / self.block
