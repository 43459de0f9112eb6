"""MXFP4 tensors for the tests of the cast, built from exponents and codes rather than quantized."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import halfbyte as hb
from tests.samples import codes_of, e2m1, float8

Matrix = npt.NDArray[Any]

MXFP4 = hb.get_format("mxfp4")


def source(exponents: Matrix, codes: Matrix, contract: str = "ocp") -> hb.QuantizedTensor:
    """A tensor from block exponents (..., blocks) and codes 0 to 15 (..., K)."""
    shape = codes.shape
    padded = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, shape[-1] % 2)]).astype(np.uint8)
    packed = (padded[..., 0::2] | (padded[..., 1::2] << 4)).astype(np.uint8)
    scales = (np.asarray(exponents) + 127).astype(np.uint8)
    return hb.QuantizedTensor(MXFP4, shape, packed, scales, None, None, getattr(hb.contracts, contract)())


def random_source(rng: np.random.Generator, spread: int, shape: tuple[int, ...] = (8, 128), top: int = 0) -> Any:
    """Random codes under exponents from top - spread to top, both ends present."""
    blocks = (*shape[:-1], -(-shape[-1] // 32))
    exponents = rng.integers(top - spread, top + 1, blocks)
    exponents.reshape(-1)[:2] = top - spread, top
    return source(exponents, rng.integers(0, 16, shape))


def decoded(q: hb.QuantizedTensor) -> npt.NDArray[np.float64]:
    """What a tensor stands for, computed apart from halfbyte: element times block scale times global scale."""
    width = q.shape[-1]
    values = e2m1(codes_of(np.asarray(q.codes))[..., :width]).astype(np.float64)
    element = "e4m3" if q.format.name == "nvfp4" else "e8m0"
    scales = np.repeat(float8(np.asarray(q.scales), element).astype(np.float64), q.format.block, axis=-1)[..., :width]
    g = np.ones(()) if q.global_scale is None else np.asarray(q.global_scale, np.float64)
    product: npt.NDArray[np.float64] = values * scales * g[..., None]
    return product


def restricted_codes(magnitudes: list[int]) -> st.SearchStrategy[int]:
    """Codes of either sign with one of these magnitude indices."""
    return st.sampled_from([code for index in magnitudes for code in (index, index + 8)])


@st.composite
def sources(draw: st.DrawFn, widest: int = 40) -> hb.QuantizedTensor:
    """Small tensors of every kind: wide and narrow, sparse, of few magnitudes, with zero blocks that have any scale."""
    rows, blocks = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    spread = draw(st.integers(0, widest))
    top = draw(st.integers(-80, 110))
    exponents = draw(hnp.arrays(np.int64, (rows, blocks), elements=st.integers(top - spread, top)))
    subset = draw(st.lists(st.integers(0, 7), min_size=1, max_size=8, unique=True))
    codes = draw(hnp.arrays(np.uint8, (rows, blocks * 32), elements=restricted_codes(subset)))
    zeroed = draw(hnp.arrays(np.bool_, (rows, blocks)))
    if draw(st.booleans()):
        codes = np.where(np.repeat(zeroed, 32, axis=1), codes & 8, codes)
    return source(exponents, codes)
