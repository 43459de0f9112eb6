"""The element formats, compared with numbers copied from their specifications and with ml_dtypes, code by code."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.formats import E2M1, E4M3, E8M0, ELEMENTS, ElementFormat
from halfbyte.testing import assert_same_bits
from tests.samples import E2M1_VALUES, f32

PEERS: dict[str, Any] = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
}

# bits, magnitude bits, sign code, NaN code, max, smallest, smallest normal, floor(log2(max))
FACTS = {
    "e2m1": (4, 3, 8, None, 6.0, 0.5, 1.0, 2),
    "e4m3": (8, 7, 0x80, 0x7F, 448.0, 2.0**-9, 2.0**-6, 8),
    "e8m0": (8, 8, 0, 255, 2.0**127, 2.0**-127, 2.0**-127, 127),
}


@pytest.mark.parametrize("name", FACTS)
def test_derived_facts(name: str) -> None:
    e = ELEMENTS[name]
    derived = (e.bits, e.magnitude_bits, e.sign_code, e.nan_code, e.max, e.smallest, e.smallest_normal, e.max_exponent)
    assert derived == FACTS[name]


def test_every_element_format_is_tested() -> None:
    assert set(FACTS) == set(ELEMENTS) == set(PEERS)
    assert ELEMENTS == {"e2m1": E2M1, "e4m3": E4M3, "e8m0": E8M0}


@pytest.mark.parametrize("name", PEERS)
def test_value_of_every_code(name: str) -> None:
    codes = np.arange(1 << ELEMENTS[name].bits, dtype=np.uint8)
    assert_same_bits(ELEMENTS[name].values, codes.view(PEERS[name]).astype(np.float32), any_nan=True)


@pytest.mark.parametrize("name", PEERS)
def test_limits_of_ml_dtypes(name: str) -> None:
    info: Any = ml_dtypes.finfo(PEERS[name])  # type: ignore[no-untyped-call]
    e = ELEMENTS[name]
    assert (e.max, e.bits) == (float(info.max), info.bits)
    assert e.smallest_normal == float(info.smallest_normal)


@pytest.mark.parametrize("name", PEERS)
def test_magnitudes_ascend_and_are_the_non_negative_finite_values(name: str) -> None:
    e = ELEMENTS[name]
    assert np.all(np.diff(e.magnitudes) > 0)
    assert_same_bits(e.magnitudes, e.values[: len(e.magnitudes)])
    assert len(e.magnitudes) == (1 << e.magnitude_bits) - e.has_nan


@pytest.mark.parametrize("name", PEERS)
def test_nan_codes(name: str) -> None:
    e = ELEMENTS[name]
    expected = {"e2m1": [], "e4m3": [0x7F, 0xFF], "e8m0": [255]}[name]
    assert np.flatnonzero(np.isnan(e.values)).tolist() == expected


def test_e2m1_by_the_specification() -> None:
    assert_same_bits(E2M1.magnitudes, f32(*E2M1_VALUES))
    assert_same_bits(E2M1.values[8:], -f32(*E2M1_VALUES))  # code 8 is -0.0


@pytest.mark.parametrize(
    ("code", "value"), [(0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6), (0x38, 1.0), (0x7E, 448.0), (0xB8, -1.0)]
)
def test_e4m3_landmarks(code: int, value: float) -> None:
    assert float(E4M3.values[code]) == value


def test_e8m0_is_powers_of_two() -> None:
    assert [float(value) for value in E8M0.values[:255]] == [2.0 ** (code - 127) for code in range(255)]


def test_e8m0_has_no_zero_and_no_negative() -> None:
    assert np.all(E8M0.values[:255] > 0)


def test_formats_are_frozen_and_compared_by_value() -> None:
    same = ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1)
    assert same == E2M1
    assert hash(same) == hash(E2M1)
    with pytest.raises(AttributeError):
        E2M1.bias = 2  # type: ignore[misc]


def test_another_format_needs_only_its_fields() -> None:
    """E3M2 of OCP MXFP6: the derived facts do not depend on the names of the three formats."""
    e3m2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3)
    assert (e3m2.bits, e3m2.max, e3m2.smallest, e3m2.smallest_normal) == (6, 28.0, 0.0625, 0.25)
    codes = np.arange(64, dtype=np.uint8)
    assert_same_bits(e3m2.values, codes.view(ml_dtypes.float6_e3m2fn).astype(np.float32))
