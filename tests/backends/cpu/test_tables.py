"""The tables of the plain kernels, compared with the contracts' own functions on every 16-bit magnitude."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends.cpu.structs import Tables, as_array
from halfbyte.backends.cpu.tables_mx import IRREGULAR, build_mx_tables, magnitude_values
from halfbyte.backends.cpu.tables_nvfp4 import build_nvfp4_tables
from halfbyte.codec.element import decode
from halfbyte.contracts.arithmetic import scale_byte, tensor_scale
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import MXRule, NVFP4Rule, TensorScale
from halfbyte.formats import E2M1, E4M3
from halfbyte.testing import assert_same_bits
from tests.samples import F32, U8, f32

INFINITY = {"bf16": 0x7F80, "fp16": 0x7C00, "fp32": 0x7F800000}

NVFP4 = {
    str(contract): contract
    for contract in [
        contracts.transformer_engine(),
        contracts.modelopt(),
        contracts.modelopt(mode="max"),
        contracts.compressed_tensors(),
        contracts.torchao(),
        contracts.torchao(two_level=False),
        contracts.qwantize(),
        contracts.flashinfer(),
        contracts.vllm(),
    ]
}

MX = {
    str(contract): contract
    for contract in [
        contracts.ocp(),
        contracts.transformer_engine(),
        contracts.modelopt(),
        contracts.compressed_tensors(),
        contracts.torchao(scaling_mode="rceil"),
        contracts.qwantize(),
        contracts.gguf(),
    ]
}


def every_magnitude(dtype: str) -> F32:
    """All finite 16-bit magnitudes as numbers; index = bits."""
    return magnitude_values(np.arange(INFINITY[dtype]), dtype)


def nvfp4(name: str, dtype: str, amax: float) -> tuple[NVFP4Rule, TensorScale, Tables]:
    rule = NVFP4[name].rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    scalar = tensor_scale(f32(amax).reshape(()), rule, hb.Amax(), dtype)
    tables = build_nvfp4_tables(rule, scalar, dtype)
    assert tables is not None
    return rule, scalar, tables


def thresholds(tables: Tables, dtype: str) -> npt.NDArray[np.int64]:
    """(byte, 8) thresholds. 16-bit thresholds are in both halves of a word."""
    words = as_array(tables.threshold, np.int32).reshape(256, 8)
    if dtype == "fp32":
        return words.astype(np.int64)
    halves = words.view(np.int16).reshape(256, 8, 2)
    assert (halves[..., 0] == halves[..., 1]).all()
    return halves[..., 0].astype(np.int64)


def codes_by_table(tables: Tables, dtype: str, byte: int, bits: npt.NDArray[Any], negative: bool) -> U8:
    bounds = thresholds(tables, dtype)[byte]
    sign = (bits > bounds[7]) if negative else np.zeros(bits.shape, bool)
    sign |= bits < as_array(tables.positive_sign, np.int32)[byte]
    return np.asarray((bits[:, None] > bounds[:7]).sum(axis=1) | np.where(sign, 8, 0), np.uint8)


# --- NVFP4: built in C++ ---


@pytest.mark.parametrize("amax", [3.71875, 2688.0, 2.0**-9])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NVFP4)
@np.errstate(all="ignore")
def test_scale_byte_of_every_amax(name: str, dtype: str, amax: float) -> None:
    rule, t, tables = nvfp4(name, dtype, amax)
    v = every_magnitude(dtype)
    expected = scale_byte(rule.pre_scale(v, t), rule.scale_byte)
    table = as_array(tables.lut, np.uint8)
    regular = table[: v.size] != IRREGULAR
    assert_same_bits(table[: v.size][regular], expected[regular])
    assert (table[v.size :] == IRREGULAR).all(), "Inf and NaN are left to the reference"
    divides_by_zero = decode(expected, E4M3) == 0
    assert (regular | divides_by_zero).all(), "only a scale of 0 may be left to the reference"


@pytest.mark.parametrize("name", NVFP4)
@np.errstate(all="ignore")
def test_scale_byte_of_float32_amaxes(name: str) -> None:
    """The first amax of every byte, its neighbours, and random amaxes."""
    rule, t, tables = nvfp4(name, "fp32", 3.7)
    starts = as_array(tables.starts, np.uint32)[1:127].astype(np.int64)
    drawn = np.random.default_rng(0).integers(0, INFINITY["fp32"], 20000)
    bits = np.unique(np.concatenate([starts - 1, starts, starts + 1, drawn, np.arange(200), [INFINITY["fp32"] - 1]]))
    bits = bits[(bits >= 0) & (bits < INFINITY["fp32"])]
    v = magnitude_values(bits, "fp32")
    expected = scale_byte(rule.pre_scale(v, t), rule.scale_byte)
    every_start = as_array(tables.starts, np.uint32).astype(np.int64)
    raw = np.searchsorted(every_start[:127], bits, side="right") - 1
    got = as_array(tables.written, np.uint8)[raw]
    got = np.where(bits < tables.zero_below, np.uint8(tables.zero_byte & 0xFF), got)
    regular = got != IRREGULAR
    assert_same_bits(got[regular], expected[regular])
    assert (regular | (decode(expected, E4M3) == 0)).all()
    bucket = as_array(tables.lut, np.uint8)[bits >> 16]
    assert (bucket <= raw).all(), "a bucket begins with the byte of its smallest amax"
    assert (bucket == np.searchsorted(every_start[:127], bits >> 16 << 16, side="right") - 1).all()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", NVFP4)
@np.errstate(all="ignore")
def test_code_of_every_magnitude_under_every_scale(name: str, dtype: str) -> None:
    rule, t, tables = nvfp4(name, dtype, 3.71875)
    reached = np.unique(as_array(tables.lut, np.uint8))
    reached = reached[reached != IRREGULAR]
    assert reached.size > 100
    bits = np.arange(INFINITY[dtype])
    for byte in reached:
        scale = decode(np.array([byte], np.uint8), E4M3)
        for negative in (False, True):
            x = every_magnitude(dtype) * np.float32(-1 if negative else 1)
            expected = round_elements(x, rule.element(x, scale, t), E2M1, rule.rounding)[0]
            got = codes_by_table(tables, dtype, int(byte), bits, negative)
            assert_same_bits(got, expected, inputs=x)


def test_factors_that_are_not_finite_are_refused() -> None:
    rule, t, _ = nvfp4("vllm()", "bf16", 1.0)
    for factor, amax in ((np.inf, 1.0), (np.nan, 1.0), (1.0, np.nan)):
        broken = TensorScale(np.float32(amax), np.float32(factor), t.largest, t.top, t.statistics)  # type: ignore[arg-type]
        assert build_nvfp4_tables(rule, broken, "bf16") is None


# --- MX: computed by calling the contract ---


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MX)
@np.errstate(all="ignore")
def test_mx_tables_on_every_magnitude(name: str, dtype: str) -> None:
    rule = MX[name].rules["mxfp4"]
    assert isinstance(rule, MXRule)
    tables, statistics = build_mx_tables(rule, E2M1, dtype), dtype if rule.statistics == "input" else "fp32"
    v, bits = every_magnitude(dtype), np.arange(INFINITY[dtype])
    byte, scale = rule.scale(v, statistics, E2M1)
    table = as_array(tables.lut, np.uint8)[: v.size]
    regular = table != IRREGULAR
    assert_same_bits(table[regular], byte[regular])
    assert regular.mean() > 0.9
    for reached in np.unique(table[regular]):
        met = np.unique(scale[regular & (table == reached)])
        assert met.size == 1, "one byte, one scale"
        inside = bits[: int(np.flatnonzero(table == reached).max()) + 1]  # no element exceeds its block's amax
        for negative in (False, True):
            x = v[: inside.size] * np.float32(-1 if negative else 1)
            if rule.nearest is not None:
                expected = rule.nearest(x, np.broadcast_to(met, x.shape))
            else:
                expected = round_elements(x, rule.quotient(x, met, statistics), E2M1, rule.rounding)[0]
            assert_same_bits(codes_by_table(tables, dtype, int(reached), inside, negative), expected, inputs=x)
