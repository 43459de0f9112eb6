"""Properties that hold for every tensor (hypothesis)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.testing import assert_same_bits
from tests.samples import E2M1_VALUES, F32, codes_of, e2m1, f32, float8

f = np.float32
few = settings(max_examples=40)

ORDINARY = st.floats(2.0**-20, 2.0**20, width=32).map(abs) | st.sampled_from([0.0, 1.0, 5.0, 6.0])
SIGNED = st.tuples(ORDINARY, st.booleans()).map(lambda pair: -pair[0] if pair[1] else pair[0])


def matrices(rows: int, columns: int, elements: st.SearchStrategy[float] = SIGNED) -> st.SearchStrategy[F32]:
    return hnp.arrays(np.float32, (rows, columns), elements=elements, fill=st.nothing())


# --- sign symmetry ---

QUANTIZERS: list[tuple[str, Any]] = [
    *(("nvfp4", name) for name in sorted(set(contracts.CONTRACTS) - {"ocp", "gguf", "transformers"})),
    *(("mxfp4", name) for name in sorted(set(contracts.CONTRACTS) - {"miles", "vllm", "transformers"})),
    ("mxfp8", "ocp"),
    ("nvfp4", contracts.transformer_engine(nvfp4_use_4over6=True)),
    ("nvfp4", contracts.fouroversix(rule="abs_max")),
    ("nvfp4", contracts.modelopt(mode="four_over_six")),
    ("mxfp4", contracts.torchao(scaling_mode="rceil")),
]


@pytest.mark.parametrize(("format", "contract"), QUANTIZERS, ids=[f"{f}-{c}" for f, c in QUANTIZERS])
@settings(max_examples=15)
@given(x=matrices(2, 32))
def test_sign_symmetry(x: F32, format: str, contract: Any) -> None:
    """-x has the scales and magnitudes of x, and the opposite sign if the magnitude is not zero.

    Signs of zeros are not compared: each contract has its own rule for them, and several test y < 0.
    """
    a, b = hb.quantize(x, format, contract), hb.quantize(-x, format, contract)
    assert_same_bits(a.scales, b.scales, inputs=x)
    sign = 0x80 if format == "mxfp8" else 8
    one, other = to_numpy(a.codes), to_numpy(b.codes)
    if format != "mxfp8":
        one, other = codes_of(one), codes_of(other)
    assert_same_bits(one % sign, other % sign, inputs=x)
    nonzero = one % sign != 0
    assert np.all((one ^ other)[nonzero] == sign)


# --- powers of two ---


@few
@given(matrices(2, 64), st.integers(-60, 60))
def test_power_of_two_shift_of_mxfp4(x: F32, k: int) -> None:
    """x·2**k has the codes of x, and scales k higher; zero blocks keep byte 0."""
    a, b = hb.quantize(x, "mxfp4"), hb.quantize(x * f(2.0**k), "mxfp4")
    assert_same_bits(a.codes, b.codes, inputs=x)
    blocks = np.abs(x).reshape(2, 2, 32).max(axis=-1)
    moved = np.where(blocks == 0, 0, to_numpy(a.scales).astype(int) + k)
    assert_same_bits(b.scales, moved.astype(np.uint8), inputs=x)


@few
@given(matrices(2, 32), st.integers(-30, 30))
def test_power_of_two_shift_of_nvfp4(x: F32, k: int) -> None:
    """A power of two changes only the tensor's amax: codes and scales stay."""
    x[0, 0] = 2.0**20  # so that the amax, and with it 2688/A, stays in the normal range
    a, b = hb.quantize(x, "nvfp4"), hb.quantize(x * f(2.0**k), "nvfp4")
    assert_same_bits(a.codes, b.codes, inputs=x)
    assert_same_bits(a.scales, b.scales, inputs=x)
    assert to_numpy(b.stored_scale)[()] == to_numpy(a.stored_scale)[()] * f(2.0**k)  # type: ignore[arg-type]


# --- rows ---


@few
@given(matrices(3, 32), st.sampled_from([hb.Amax(), hb.FourSix(), hb.FourSix("mse", 256, True)]))
def test_rows_are_independent_under_row_scaling(x: F32, method: Any) -> None:
    whole = hb.quantize(x, "nvfp4", scaling="row", method=method)
    for index, row in enumerate(x):
        alone = hb.quantize(row, "nvfp4", scaling="row", method=method)
        assert_same_bits(to_numpy(whole.codes)[index], to_numpy(alone.codes))
        assert_same_bits(to_numpy(whole.scales)[index], to_numpy(alone.scales))
        assert to_numpy(whole.global_scale)[index] == to_numpy(alone.global_scale)[()]  # type: ignore[arg-type]


@pytest.mark.parametrize("contract", ["transformer_engine", "miles", "modelopt", "torchao", "flashinfer", "vllm"])
@settings(max_examples=15)
@given(x=matrices(3, 32), amax=st.floats(1, 2.0**20, width=32))
def test_rows_are_independent_given_the_amax(x: F32, amax: float, contract: str) -> None:
    whole = hb.quantize(x, "nvfp4", contract, global_amax=amax)
    for index, row in enumerate(x):
        alone = hb.quantize(row, "nvfp4", contract, global_amax=amax)
        assert_same_bits(to_numpy(whole.codes)[index], to_numpy(alone.codes))
        assert_same_bits(to_numpy(whole.scales)[index], to_numpy(alone.scales))


@few
@given(matrices(3, 64))
def test_blocks_of_mx_are_independent(x: F32) -> None:
    whole = hb.quantize(x, "mxfp4")
    alone = [hb.quantize(x[:, start : start + 32], "mxfp4") for start in (0, 32)]
    assert_same_bits(whole.codes, np.concatenate([to_numpy(q.codes) for q in alone], axis=1))
    assert_same_bits(whole.scales, np.concatenate([to_numpy(q.scales) for q in alone], axis=1))


# --- 4over6 ---


def candidate(block: F32, pre_scale: Any, amax: Any, top: Any) -> tuple[int, F32]:
    """Scale byte and decoded block for one candidate scale, by ml_dtypes and scalars."""
    scale = np.minimum(pre_scale, f(448)).astype(ml_dtypes.float8_e4m3fn)
    enc = f(top / amax)
    reciprocal = f(f(1) / f(f(scale) * f(f(1) / enc))) if scale > 0 else np.finfo(np.float32).max
    with np.errstate(over="ignore"):
        y = np.clip((block * reciprocal).astype(np.float32), -6, 6)
    q = e2m1(y.astype(ml_dtypes.float4_e2m1fn).view(np.uint8))
    return int(scale.view(np.uint8)), (((q * f(scale)).astype(np.float32) * amax) / top).astype(np.float32)


def error(decoded: F32, block: F32, kind: str) -> Any:
    """The error that 4over6 minimises: magnitudes or squares, added one by one in float32."""
    total = f(0)
    for difference in decoded - block:
        total = f(total + (f(difference * difference) if kind == "mse" else abs(difference)))
    return total


@pytest.mark.parametrize("e4m3_max", [448, 256])
@pytest.mark.parametrize("kind", ["mae", "mse"])
@few
@given(x=matrices(2, 32, st.floats(-8, 8, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3)))
def test_four_six_takes_the_better_of_its_two(x: F32, kind: Any, e4m3_max: int) -> None:
    """Never worse than the scale that maps the amax to 6, and strictly better if it chose the scale for 4."""
    x[0, 0] = 8
    top, amax = f(6 * e4m3_max), f(8)
    q = hb.quantize(x, "nvfp4", method=hb.FourSix(kind, e4m3_max))
    decoded, scales = to_numpy(hb.dequantize(q)), to_numpy(q.scales)
    for row in range(2):
        for index in range(2):
            block = x[row, 16 * index : 16 * index + 16]
            base = f(f(np.abs(block).max() / f(6)) * f(top / amax))
            six, four = candidate(block, base, amax, top), candidate(block, f(base * f(1.5)), amax, top)
            got = error(decoded[row, 16 * index : 16 * index + 16], block, kind)
            with_six, with_four = error(six[1], block, kind), error(four[1], block, kind)
            assert got == min(with_six, with_four)
            assert scales[row, index] == (four[0] if with_four < with_six else six[0])


@few
@given(matrices(2, 32, st.floats(-8, 8, width=32).filter(lambda v: v == 0 or abs(v) > 1e-3)))
def test_four_six_is_never_worse_than_amax(x: F32) -> None:
    """Compared with the plain method, if both have the same scale for 6 (their formulas differ in the last bit)."""
    x[0, 0] = 8
    plain, better = hb.quantize(x, "nvfp4"), hb.quantize(x, "nvfp4", method="four_six")
    a, b = to_numpy(hb.dequantize(plain)).reshape(-1, 16), to_numpy(hb.dequantize(better)).reshape(-1, 16)
    enc = f(f(2688) / f(8))
    for block, one, other, byte in zip(x.reshape(-1, 16), a, b, to_numpy(plain.scales).reshape(-1), strict=True):
        six = np.minimum(f(f(np.abs(block).max() / f(6)) * enc), f(448)).astype(ml_dtypes.float8_e4m3fn)
        if six.view(np.uint8) == byte:
            assert error(other, block, "mae") <= error(one, block, "mae")


# --- exact round trips ---

GRID = st.lists(st.integers(0, 15), min_size=31, max_size=31)


@few
@given(GRID, st.integers(2, 252))
def test_mxfp4_of_its_own_values(codes: list[int], byte: int) -> None:
    """If the block has a 6 (or 4), the rule finds the same scale, and every code comes back, also -0.0."""
    given_codes = np.array([7, *codes], np.uint8)
    x = e2m1(given_codes) * f(2.0 ** (byte - 127))
    q = hb.quantize(x, "mxfp4")
    assert to_numpy(q.scales).tolist() == [byte]
    assert_same_bits(codes_of(to_numpy(q.codes)), given_codes)
    assert_same_bits(hb.dequantize(q), x)


@few
@given(st.lists(st.integers(0, 255).filter(lambda c: c % 128 != 127), min_size=31, max_size=31), st.integers(2, 240))
def test_mxfp8_of_its_own_values(codes: list[int], byte: int) -> None:
    given_codes = np.array([0x7E, *codes], np.uint8)
    x = float8(given_codes, "e4m3") * f(2.0 ** (byte - 127))
    q = hb.quantize(x, "mxfp8")
    assert to_numpy(q.scales).tolist() == [byte]
    assert_same_bits(q.codes, given_codes)
    assert_same_bits(hb.dequantize(q), x)


@pytest.mark.parametrize("contract", ["transformer_engine", "modelopt", "torchao", "miles"])
@few
@given(
    codes=st.lists(st.integers(0, 15), min_size=15, max_size=15),
    byte=st.integers(8, 0x7E),
    k=st.integers(-60, 60),
)
def test_nvfp4_of_its_own_values(codes: list[int], byte: int, k: int, contract: str) -> None:
    """Blocks q·S·2**k with A = 2688·2**k get the same scale, and decoding is exact except for the sign of zero."""
    given_codes = np.array([7, *codes], np.uint8)
    scale = float8(np.array([byte], np.uint8), "e4m3")
    x = (e2m1(given_codes) * scale * f(2.0**k)).astype(np.float32)
    q = hb.quantize(x, "nvfp4", contract, global_amax=2688 * 2.0**k)
    assert to_numpy(q.scales).tolist() == [byte]
    assert_same_bits(to_numpy(hb.dequantize(q)) + f(0), x + f(0))


def test_every_value_is_on_the_typed_out_grid() -> None:
    """Checks the table that these tests use for decoding: quantize gives each value back from a block with a 6."""
    for value in E2M1_VALUES:
        q = hb.quantize(f32(6, value, -value, *[0.0] * 29), "mxfp4")
        assert to_numpy(hb.dequantize(q))[:3].tolist() == [6, value, -value]
