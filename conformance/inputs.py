"""Operands for tests. Mistakes of a quantizer show on ties, at the ends of the range, and next to zeros.

`make(name, shape, dtype, seed)` is a pure function of its arguments. Blocks run along the last axis. If a shape is not
whole blocks, whole blocks are drawn and cropped. The E2M1 and E4M3 tables are written out here again, so that the tests
do not depend on halfbyte's own tables.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
F64 = npt.NDArray[np.float64]
Rng = np.random.Generator

DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}

E2M1_TIES = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
E4M3_VALUES = np.array(
    [m * 2.0**-9 for m in range(1, 8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
)
E4M3_TIES = (E4M3_VALUES[:-1] + E4M3_VALUES[1:]) / 2
BLOCK, MX_BLOCK = 16, 32


def make(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> Array:
    """The operand of that name, in float32, float16 or ml_dtypes.bfloat16. All but nonfinite, nan, inf are finite."""
    rng = np.random.default_rng([zlib.crc32(name.encode()), seed, *shape])
    width = (
        shape[-1] if name in NONFINITE else -(-shape[-1] // MX_BLOCK) * MX_BLOCK
    )  # cropping could remove the few NaN and Inf
    drawn = GENERATORS[name](rng, (*shape[:-1], width), DTYPES[dtype])
    return np.ascontiguousarray(_cast(drawn, DTYPES[dtype])[..., : shape[-1]])


def _cast(x: Array, dtype: np.dtype[Any]) -> Array:
    """Convert to the operand's dtype. Finite values beyond its range become its largest value."""
    if x.dtype == dtype:
        return x
    largest = _limit(dtype, "max")
    return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)


def _limit(dtype: np.dtype[Any], name: str) -> float:
    """max, smallest_normal or smallest_subnormal of a dtype."""
    return float(getattr(ml_dtypes.finfo(dtype), name))  # type: ignore[no-untyped-call]


def _signs(rng: Rng, shape: tuple[int, ...]) -> F64:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def _blocks(x: F64, block: int) -> F64:
    """A view of shape (..., blocks, block)."""
    view: F64 = x.reshape(*x.shape[:-1], -1, block)
    return view


# --- everyday ---


def gauss(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with another standard deviation for each tensor, so that the last bits of the amax vary."""
    return rng.normal(scale=2 ** rng.uniform(-6, 2), size=shape)


def heavy(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Student's t with three degrees of freedom."""
    return 2 ** rng.uniform(-6, 2) * rng.standard_t(3, shape)


def outlier(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with one element in a hundred fifty times larger, so that most blocks have small scales."""
    return gauss(rng, shape, dtype) * np.where(rng.random(shape) < 0.01, 50, 1)


def ints(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Small whole numbers, whose sums are exact in any order."""
    return rng.integers(-12, 13, shape).astype(np.float64)


# --- decision points ---


def _anchored(x: F64, rng: Rng, exponent: float) -> F64:
    """Set one element to 6·448 or 6·256 times a power of two, so that the tensor-level factor is exact."""
    x.reshape(-1)[rng.integers(x.size)] = 6 * rng.choice([448.0, 256.0]) * exponent
    return x


def _exponent(rng: Rng, dtype: np.dtype[Any]) -> float:
    """An exponent e for which 2688·2**e, and an eighth of the smallest scale times 2**e, are inside the dtype."""
    return float(np.exp2(rng.integers(-4, 3) if dtype == np.float16 else rng.integers(-20, 20)))


def ties(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Every element is half-way between two E2M1 values of its block, whose scale is an E4M3 value."""
    exponent = _exponent(rng, dtype)
    x = rng.choice(E2M1_TIES, shape) * _signs(rng, shape)
    blocks = _blocks(x, BLOCK)
    blocks[..., 0] = 6
    blocks *= rng.choice(E4M3_VALUES[E4M3_VALUES >= 2.0**-3], blocks.shape[:-1])[..., None] * exponent
    return _anchored(x, rng, exponent)


def e4ties(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """A sixth of every block amax is half-way between two E4M3 values."""
    exponent = _exponent(rng, dtype)
    x = rng.uniform(-1, 1, shape)
    blocks = _blocks(x, BLOCK)
    blocks[..., 0] = 1
    blocks *= 6 * rng.choice(E4M3_TIES[E4M3_TIES >= 2.0**-3], blocks.shape[:-1])[..., None] * exponent
    return _anchored(x, rng, exponent)


def near_ties(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """`ties` or `e4ties`, with each element moved up or down by one unit in the last place, or not moved."""
    exact = _cast((ties if rng.random() < 0.5 else e4ties)(rng, shape, dtype), dtype)
    largest = exact == np.abs(exact.astype(np.float64)).max()
    towards = np.where(rng.random(shape) < 0.5, -np.inf, np.inf).astype(dtype)
    moved = np.nextafter(exact, towards)
    return np.where(largest | (rng.random(shape) < 0.2), exact, moved).astype(dtype)


def mx_ties(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """Block amaxes within 45 units in the last place of points where an MX exponent changes; elements on E2M1 ties."""
    x = rng.choice(E2M1_TIES, shape) * _signs(rng, shape) / 8
    blocks = _blocks(x, MX_BLOCK)
    span = (-10, 11) if dtype == np.float16 else (-120, 121)
    scale = np.exp2(rng.integers(*span, blocks.shape[:-1]))
    peaks = rng.choice([1.0, 1.5, 1.75], scale.shape) * scale
    blocks *= scale[..., None]
    blocks[..., 0] = peaks
    exact = _cast(x, dtype)
    steps = rng.choice([0, 0, 1, -1, 2, -2, 7, -7, 22, 23, -22, -44, -45], scale.shape)
    bits = exact.view(np.dtype(f"i{dtype.itemsize}"))
    _blocks(bits, MX_BLOCK)[..., 0] += steps.astype(
        bits.dtype
    )  # the bits of neighbouring positive floats are neighbouring integers
    return exact


# --- ends of the range ---


def tiny(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal numbers scaled to the lower end of the dtype's range; some are subnormal."""
    return rng.normal(scale=_limit(dtype, "smallest_normal") * 2 ** rng.uniform(-3, 12), size=shape)


def tiny_mixed(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Blocks of very different sizes, so that many scales round to zero or to the smallest scale."""
    x = rng.normal(size=shape)
    blocks = _blocks(x, BLOCK)
    blocks *= np.exp2(rng.uniform(-30, 0, blocks.shape[:-1]))[..., None]
    return x


def huge(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Numbers up to the dtype's largest, which is one of them."""
    largest = _limit(dtype, "max")
    x = largest * rng.uniform(-1, 1, shape)
    x.reshape(-1)[rng.integers(x.size)] = largest
    return x


def wide(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Every exponent of the dtype's range equally often."""
    low, high = np.log2([_limit(dtype, "smallest_subnormal"), _limit(dtype, "max")])
    return _signs(rng, shape) * np.exp2(rng.uniform(low, high, shape))


def pow2(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Powers of two of either sign."""
    span = (-14, 15) if dtype == np.float16 else (-40, 41)
    return _signs(rng, shape) * np.exp2(rng.integers(*span, shape))


# --- zeros ---


def zeros(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Only +0."""
    return np.zeros(shape)


def zero_block(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with a third of the blocks zero."""
    x = gauss(rng, shape, dtype)
    blocks = _blocks(x, BLOCK)
    blocks *= (rng.random(blocks.shape[:-1]) > 1 / 3)[..., None]
    x += 0.0  # no -0.0; `signed_zero` has those
    return x


def signed_zero(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Zeros of both signs, among values that round to zero and values that do not."""
    x = gauss(rng, shape, dtype)
    x *= rng.choice([0.0, 0.0, 0.01, 1.0], shape)
    return x * _signs(rng, shape)


# --- not numbers ---


def _sprinkled(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any], values: list[float]) -> F64:
    """Normal, with some of the given values in a few blocks."""
    x = gauss(rng, shape, dtype)
    count = max(1, x.size // 200)
    x.reshape(-1)[rng.choice(x.size, count, replace=False)] = rng.choice(values, count)
    return x


def nan(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with NaNs."""
    return _sprinkled(rng, shape, dtype, [np.nan])


def inf(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with infinities of both signs."""
    return _sprinkled(rng, shape, dtype, [np.inf, -np.inf])


def nonfinite(rng: Rng, shape: tuple[int, ...], dtype: np.dtype[Any]) -> F64:
    """Normal, with NaNs and infinities."""
    return _sprinkled(rng, shape, dtype, [np.nan, np.inf, -np.inf])


GENERATORS: dict[str, Callable[[Rng, tuple[int, ...], np.dtype[Any]], Array]] = {
    make.__name__: make
    for make in (
        *(gauss, heavy, outlier, ints),
        *(ties, e4ties, near_ties, mx_ties),
        *(tiny, tiny_mixed, huge, wide, pow2),
        *(zeros, zero_block, signed_zero),
        *(nonfinite, nan, inf),
    )
}
NONFINITE = ("nonfinite", "nan", "inf")
FINITE = tuple(name for name in GENERATORS if name not in NONFINITE)
