"""The multipliers of contracts that divide or round ties down give the same codes for every input of the dtype."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.backends.cpu.multipliers import fit_multipliers
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables, element_constants
from halfbyte.codec.bits import DTYPES, F32, widen
from halfbyte.codec.element import encode_magnitude
from halfbyte.contracts import NVFP4Rule
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import TensorScale
from halfbyte.formats import E2M1, E4M3

CONTRACTS = ["modelopt", "compressed_tensors", "qwantize"]


def numbers(contract: str, amax: float) -> tuple[NVFP4Rule, TensorScale]:
    rule = hb.contracts.CONTRACTS[contract]().rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    top = rule.anchor(hb.Amax())
    value = np.asarray(amax, np.float32)
    return rule, TensorScale(value, rule.factor(value, top, "fp32"), np.float32(6), top, "fp32")


def every_magnitude(dtype: str) -> F32:
    return widen(np.arange({"bf16": 0x7F80, "fp16": 0x7C00}[dtype], dtype=np.uint16).view(DTYPES[dtype]))


def near_of(rule: NVFP4Rule, t: TensorScale) -> F32:
    divides, constants = element_constants(rule, t)
    with np.errstate(all="ignore"):
        return np.reciprocal(constants) if divides else constants


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("amax", [1.0, 0.0317, 3.1e-5])
@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_codes_of_every_magnitude(contract: str, amax: float, dtype: str) -> None:
    rule, t = numbers(contract, amax)
    tables = build_nvfp4_tables(rule, t, dtype)
    assert tables is not None
    fitted = fit_multipliers(tables, near_of(rule, t), 1.0, dtype)
    assert fitted is not None
    x = every_magnitude(dtype)
    with np.errstate(all="ignore"):
        for byte in (1, 5, 8, 15, 16, 40, 64, 67, 100, 126):
            codes = round_elements(x, rule.element(x, E4M3.values[byte], t), E2M1, rule.rounding)[0] & 7
            np.testing.assert_array_equal(encode_magnitude(x * fitted[byte], E2M1, "even"), codes)


def test_one_multiplier_for_every_octave() -> None:
    """From byte 16 on, the multipliers of a significand differ by powers of two: the kernel shifts exponents."""
    rule, t = numbers("qwantize", 0.7)
    tables = build_nvfp4_tables(rule, t, "bf16")
    assert tables is not None
    fitted = fit_multipliers(tables, near_of(rule, t), 1.0, "bf16")
    assert fitted is not None
    np.testing.assert_array_equal(fitted[16:119], fitted[24:127] * 2)


def test_exact_ties_may_have_none() -> None:
    """With a factor of 1, quotients fall exactly on ties. Some ties go up and some down, which no product can do."""
    rule, t = numbers("modelopt", 2688.0)
    assert float(t.factor) == 1.0
    tables = build_nvfp4_tables(rule, t, "bf16")
    assert tables is not None
    assert fit_multipliers(tables, near_of(rule, t), 1.0, "bf16") is None


def test_float32_has_none() -> None:
    rule, t = numbers("modelopt", 1.0)
    tables = build_nvfp4_tables(rule, t, "fp32")
    assert tables is not None
    assert fit_multipliers(tables, near_of(rule, t), 1.0, "fp32") is None
