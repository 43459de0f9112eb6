"""Amaxes without a usable scale, and factors of smoothing that a vector cannot take: both sides of each limit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint.execute.pieces import Piece
from halfbyte.checkpoint.execute.repair import LARGEST_PRODUCT, SMALLEST_AMAX, usable_amax
from halfbyte.checkpoint.execute.smoothed import rescaled, smoothed, values_dtype
from halfbyte.checkpoint.plan.types import Factors
from halfbyte.errors import CheckpointError
from halfbyte.testing import assert_same_bits

F = np.float32
BELOW = np.nextafter(SMALLEST_AMAX, F(0))


@pytest.mark.parametrize(
    ("amax", "repaired"),
    [
        (F(0), F(2688)),
        (F(1e-45), SMALLEST_AMAX),
        (BELOW, SMALLEST_AMAX),
        (SMALLEST_AMAX, SMALLEST_AMAX),
        (F(3e38), F(3e38)),
    ],
)
def test_usable_amaxes(amax: np.float32, repaired: np.float32) -> None:
    """The smallest one is the first whose scale is no subnormal."""
    assert F(2688) * F(2.0**-126) == SMALLEST_AMAX
    assert F(2688) == LARGEST_PRODUCT
    assert SMALLEST_AMAX / F(2688) == np.finfo(F).tiny > BELOW / F(2688)
    assert usable_amax(amax, "m", True) == repaired
    assert usable_amax(amax, "m", False) == amax


@pytest.mark.parametrize(("amax", "word"), [(np.nan, "NaN"), (np.inf, "Inf")])
@pytest.mark.parametrize("repairs", [True, False])
def test_unusable_amaxes(amax: float, word: str, repairs: bool) -> None:
    with pytest.raises(CheckpointError) as caught:
        usable_amax(F(amax), "a.b", repairs)
    assert str(caught.value) == (
        f"a.b holds {word}: its scale would be unusable; repair the source, or keep the module unquantized (--keep a.b)"
    )


def unit(kind: str, dtype: str, factors: Factors | None) -> Any:
    return SimpleNamespace(
        module="m", sources=[SimpleNamespace(kind=kind, weight=SimpleNamespace(dtype=dtype))], factors=factors
    )


def exponents(*values: int) -> bytes:
    return np.array(values, np.int8).tobytes()


@pytest.mark.parametrize(
    ("kind", "dtype", "plain", "scaled"),
    [
        ("float", "BF16", ml_dtypes.bfloat16, ml_dtypes.bfloat16), ("float", "F32", F, F),
        ("float", "F16", np.float16, F), ("fp8", "F8_E4M3", F, F),
    ],
)  # fmt: skip
def test_the_dtype_of_values(kind: str, dtype: str, plain: type, scaled: type) -> None:
    """float16 has too little range for factors."""
    assert values_dtype(unit(kind, dtype, None)) == plain
    assert values_dtype(unit(kind, dtype, Factors(b"\0"))) == scaled


def test_factors_of_rows_and_columns() -> None:
    """Columns grow, rows shrink; a piece takes the factors of its own rows."""
    x = np.arange(1, 7, dtype=np.float16).reshape(2, 3)
    both = Factors(exponents(0, 1, -1), exponents(5, 5, 1, 2))
    found = smoothed(unit("float", "F16", both), both, Piece(0, 0, 2, 4), x)
    assert_same_bits(found, (x * [[1, 2, 0.5]] / [[2], [4]]).astype(F))
    columns = Factors(columns=exponents(0, 1, -1))
    assert_same_bits(
        smoothed(unit("float", "F16", columns), columns, Piece(0, 0, 2, 4), x), (x * [[1, 2, 0.5]]).astype(F)
    )
    rows = Factors(rows=exponents(1, 2))
    assert_same_bits(smoothed(unit("float", "F16", rows), rows, Piece(0, 0, 0, 2), x), (x / [[2], [4]]).astype(F))


def test_vectors_are_divided_without_rounding() -> None:
    x = np.array([[1.0], [3.0], [6.0]], np.float16)
    factors = Factors(rows=exponents(9, 1, -1, 2))
    found = rescaled(unit("float", "F16", factors), factors, Piece(0, 0, 1, 4), x)
    assert_same_bits(found, np.array([[0.5], [6], [1.5]], np.float16))
    for bad in (2.0**-24, 65504.0, np.nan):
        x[1] = bad
        with pytest.raises(CheckpointError) as caught:
            rescaled(
                unit("float", "F16", factors), Factors(rows=exponents(0, 1 if bad < 1 else -1, 0)), Piece(0, 0, 0, 3), x
            )
        assert str(caught.value) == (
            "m: float16 cannot hold its values divided by the factors; convert without --smooth"
        )
