"""The kernel that verify compares with: the same answers as numpy's, on every instruction set and every kind of row."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends.compare import Compared, ScaleMark, compare_rows
from halfbyte.formats import E4M3, E8M0
from halfbyte.verify.against import measure
from halfbyte.verify.against.measure import compared
from halfbyte.verify.nearest import BY_CODE, Encoded
from tests.backends.test_bits import ISA_NAMES
from tests.samples import F32, gaussian

BY_AMAX = ~(ScaleMark.LEAST_SQUARES) & 0xFF
"""Marks that follow from amaxes alone, whose computation has no order."""


def encoded(x: F32, format: str, method: str = "amax") -> Encoded:
    q = hb.quantize(x, format, "modelopt", method)
    scale_format = E4M3 if format == "nvfp4" else E8M0
    scales = np.asarray(q.scales)
    number = 1.0 if q.stored_scale is None else float(np.asarray(q.stored_scale))
    return Encoded(np.asarray(q.codes), scales, scale_format.values[scales], number, scale_format)


def damaged(stored: Encoded, seed: int) -> Encoded:
    """Some codes and some scale bytes changed at random, to NaN, negative and zero scales as well."""
    random = np.random.default_rng(seed)
    codes, scales = stored.codes.copy(), stored.scale_bytes.copy()
    codes.reshape(-1)[random.integers(codes.size, size=40)] ^= random.integers(1, 256, 40).astype(np.uint8)
    scales.reshape(-1)[random.integers(scales.size, size=20)] = random.integers(0, 256, 20)
    return Encoded(codes, scales, stored.scale_format.values[scales], stored.tensor_scale, stored.scale_format)


def by_numpy(stored: Encoded, source: F32, monkeypatch: pytest.MonkeyPatch) -> Compared:
    with monkeypatch.context() as patch:
        patch.setattr(measure, "compare_rows", lambda *arguments: None)
        return compared(stored, source)


def assert_agree(got: Compared, wanted: Compared) -> None:
    """Counts, maxima and marks are equal; sums, which are added in another order, nearly so."""
    assert got.blocks == wanted.blocks
    assert got.wrong.tolist() == wanted.wrong.tolist()
    assert got.largest == pytest.approx(wanted.largest, rel=1e-6)
    np.testing.assert_allclose(got.squares, wanted.squares, rtol=1e-5)
    np.testing.assert_allclose(got.off, wanted.off, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(got.factor_sums, wanted.factor_sums, rtol=1e-4)
    assert (got.marks is None) == (wanted.marks is None)
    if got.marks is not None and wanted.marks is not None:
        assert (got.marks & np.uint8(BY_AMAX)).tolist() == (wanted.marks & np.uint8(BY_AMAX)).tolist()
        told = (got.marks & np.uint8(ScaleMark.TOLD)) != 0
        assert np.mean((got.marks != wanted.marks)[told]) < 0.001 if told.any() else True


@pytest.mark.parametrize("isa", ISA_NAMES)
@pytest.mark.parametrize("method", ["amax", "optimal"])
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_kernel_gives_what_numpy_gives(
    dtype: type, format: str, method: str, isa: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa)
    for rows, columns, size in ((3, 32, 1.0), (5, 16 * 300 + 32, 0.02), (40, 96, 30.0)):
        x: npt.NDArray[Any] = (gaussian(rows, columns, seed=rows) * np.float32(size)).astype(dtype)
        x[0, :32] = 0
        whole = encoded(x.astype(np.float32), format, method)
        for stored in (whole, damaged(whole, rows)):
            found = compared(stored, x)
            assert_agree(found, by_numpy(stored, x.astype(np.float32), monkeypatch))
        assert compared(whole, x).wrong.sum() == 0
        assert compared(damaged(whole, rows), x).wrong.sum() > 0


@pytest.mark.parametrize("isa", ISA_NAMES)
def test_numbers_at_the_ends_of_the_range(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Squares beyond float32 are added in float64; NaN reaches the sums of its row and nothing else."""
    monkeypatch.setenv("HALFBYTE_ISA", isa)
    stored = encoded(gaussian(4, 64), "nvfp4")
    source = gaussian(4, 64)
    source[0] *= np.float32(1e30)
    source[1] *= np.float32(1e-30)
    source[2, 5] = np.nan
    found, wanted = compared(stored, source), by_numpy(stored, source, monkeypatch)
    np.testing.assert_allclose(found.squares, wanted.squares, rtol=1e-5)
    np.testing.assert_allclose(found.off, wanted.off, rtol=1e-4)
    assert np.isnan(found.off).tolist() == [False, False, True, False]
    assert found.squares[0] > 1e59
    assert 0 < found.squares[1] < 1e-57
    assert found.largest == pytest.approx(wanted.largest)
    assert found.wrong.tolist() == wanted.wrong.tolist()


def test_rows_that_the_kernel_does_not_take_go_to_numpy() -> None:
    stored = encoded(gaussian(4, 64), "nvfp4")
    numbers = E4M3.values, stored.tensor_scale, BY_CODE
    x = gaussian(4, 64)
    assert compare_rows(x, stored.codes, stored.scale_bytes, numbers, None) is not None
    assert compare_rows(x.astype(np.float16), stored.codes, stored.scale_bytes, numbers, None) is None
    assert compare_rows(np.asfortranarray(x), stored.codes, stored.scale_bytes, numbers, None) is None
    assert compared(stored, x.astype(np.float16)).wrong.sum() == compared(stored, x).wrong.sum()
