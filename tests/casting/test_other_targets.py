"""NVFP4 to MXFP4, and every format to bfloat16."""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.casting import to_mxfp4
from halfbyte.formats import E2M1
from halfbyte.testing import assert_same_bits
from tests.casting.sources import decoded, random_source
from tests.samples import E2M1_VALUES, gaussian


def test_there_and_back_is_bit_exact() -> None:
    q = random_source(np.random.default_rng(0), 12)
    nvfp4, _ = hb.cast(q, "nvfp4")
    back, report = hb.cast(nvfp4, "mxfp4")
    assert_same_bits(hb.dequantize(back), hb.dequantize(q))
    assert report.lossless
    assert report.label in ("bit-exact", "value-exact")
    assert (report.source, report.target) == ("nvfp4", "mxfp4")


def test_codes_that_fit_are_kept_bit_for_bit() -> None:
    """Every half holds a 6: no other power of two serves, so codes and scales come back."""
    rng = np.random.default_rng(1)
    codes = rng.integers(0, 16, (4, 64))
    codes[:, ::16] = 7
    from tests.casting.sources import source

    q = source(rng.integers(-5, 3, (4, 2)), codes)
    back, report = hb.cast(hb.cast(q, "nvfp4")[0], "mxfp4")
    assert_same_bits(back.codes, q.codes)
    assert_same_bits(back.scales, q.scales)
    assert (report.label, report.verbatim) == ("bit-exact", 16)


def best_block_error(values: list[float]) -> float:
    """Every power of two and every code, in plain Python."""
    return min(
        sum(min((abs(v) - c * 2.0**k) ** 2 for c in E2M1_VALUES) for v in values) for k in range(-40, 20)
    )  # fmt: skip


@pytest.mark.parametrize("std", [1.0, 1e-3])
def test_nvfp4_to_mxfp4_is_the_best_there_is(std: float) -> None:
    q = hb.quantize(gaussian(4, 128) * np.float32(std), "nvfp4", "modelopt")
    result, report = hb.cast(q, "mxfp4")
    values = np.asarray(hb.dequantize(q), np.float64)
    blocks = values.reshape(-1, 32)
    error = ((decoded(result) - values) ** 2).reshape(-1, 32).sum(axis=1)
    for got, block in zip(error, blocks, strict=True):
        assert got == pytest.approx(best_block_error(block.tolist()), rel=1e-6)
    assert report.squared_error == pytest.approx(error.sum(), rel=1e-9)
    assert report.label == "lossy"
    plain = hb.cast(q, "mxfp4", algorithm="requantize")
    assert_same_bits(plain[0].codes, hb.quantize(hb.dequantize(q), "mxfp4").codes)
    assert report.squared_error <= plain[1].squared_error


def test_nvfp4_to_mxfp4_of_zeros_and_ragged_rows() -> None:
    x = gaussian(3, 40)
    x[0] = 0
    q = hb.quantize(x, "nvfp4", "modelopt")
    result, report = hb.cast(q, "mxfp4")
    assert (result.shape, np.asarray(result.scales)[0].tolist()) == ((3, 40), [0, 0])
    assert report.zero == 3
    assert not np.asarray(hb.dequantize(result))[0].any()


def test_mxfp4_to_bfloat16_is_exact() -> None:
    q = random_source(np.random.default_rng(0), 254, (64, 256), top=127)
    values, report = hb.cast(q, "bfloat16")
    assert np.asarray(values).dtype == ml_dtypes.bfloat16
    assert_same_bits(np.asarray(values).astype(np.float32), hb.dequantize(q))
    assert (report.label, report.squared_error, report.target) == ("value-exact", 0, "bfloat16")


def test_nvfp4_to_bfloat16_depends_on_the_global_scale() -> None:
    lossless = hb.cast(hb.cast(random_source(np.random.default_rng(0), 9), "nvfp4")[0], "bf16")[1]
    assert lossless.label == "value-exact"
    q = hb.quantize(gaussian(8, 64), "nvfp4", "modelopt")
    values, report = hb.cast(q, "bf16")
    error = np.asarray(values).astype(np.float64) - np.asarray(hb.dequantize(q), np.float64)
    assert report.label == "lossy"
    assert report.squared_error == pytest.approx(float((error**2).sum()))
    assert report.max_error == np.abs(error).max()


def test_mxfp8_to_bfloat16() -> None:
    q = hb.quantize(gaussian(8, 64), "mxfp8")
    values, report = hb.cast(q, "bfloat16")
    assert report.label == "value-exact"
    assert_same_bits(np.asarray(values).astype(np.float32), hb.dequantize(q))
    tiny = hb.quantize(np.full((1, 32), 2.0**-130, np.float32), "mxfp8")
    assert hb.cast(tiny, "bfloat16")[1].label == "value-exact"


def test_nan_scales_decode_to_nan_in_bfloat16_and_count_as_kept() -> None:
    q = random_source(np.random.default_rng(0), 3)
    scales = np.asarray(q.scales).copy()
    scales[0, 0] = 255
    broken = hb.QuantizedTensor(q.format, q.shape, q.codes, scales, None, None, q.contract)
    values, report = hb.cast(broken, "bfloat16")
    assert np.isnan(np.asarray(values).astype(np.float32)[0, :32]).all()
    assert report.label == "value-exact"


def test_nvfp4_to_mxfp4_at_the_end_of_float32() -> None:
    """3.4e38 is nearest to 2^128, which decodes to Inf: the next smaller value is taken."""
    q = hb.quantize(np.full((1, 32), 3.3e38, np.float32), "nvfp4", "modelopt")
    result, report = hb.cast(q, "mxfp4")
    assert np.isfinite(np.asarray(hb.dequantize(result))).all()
    assert np.isfinite(report.squared_error)


def test_any_format_goes_to_bfloat16() -> None:
    """Also one that halfbyte does not know, under a contract of its own."""
    six = dataclasses.replace(E2M1, name="e2m3", mantissa_bits=3)
    format = dataclasses.replace(hb.get_format("mxfp8"), name="mxfp6", element=six)
    ocp = hb.contracts.ocp()
    contract = dataclasses.replace(ocp, rules={"mxfp6": ocp.rules["mxfp8"]})
    q = hb.quantize(gaussian(4, 64), format, contract)
    values, report = hb.cast(q, "bfloat16")
    assert_same_bits(np.asarray(values).astype(np.float32), hb.dequantize(q))
    assert (report.source, report.label) == ("mxfp6", "value-exact")
    with pytest.raises(hb.UnsupportedError, match="no cast from mxfp6 to nvfp4; it takes mxfp4; cast it to bfloat16"):
        hb.cast(q, "nvfp4")


def test_the_best_power_of_two_of_all() -> None:
    """No scale byte has a smaller error, whatever the size of the numbers."""
    rng = np.random.default_rng(5)
    q = hb.quantize((rng.standard_normal((16, 64)) * np.exp(rng.standard_normal((16, 1)))).astype(np.float32), "nvfp4")
    result, _ = hb.cast(q, "mxfp4")
    values = np.asarray(hb.dequantize(q), np.float64).reshape(16, 2, 32)
    got = ((np.asarray(hb.dequantize(result), np.float64).reshape(values.shape) - values) ** 2).sum(axis=-1)
    grid = np.concatenate([E2M1_VALUES, -np.asarray(E2M1_VALUES)])
    least = np.full(got.shape, np.inf)
    for exponent in range(-12, 6):
        offered = grid * 2.0**exponent
        nearest = np.abs(values[..., None] - offered).min(axis=-1)
        least = np.minimum(least, (nearest**2).sum(axis=-1))
    np.testing.assert_allclose(got, least, rtol=1e-9)


def test_a_smaller_scale_wins_where_clipping_one_value_is_cheaper() -> None:
    """7.5 beside sixteen times 0.5: scale 2 keeps 8 and loses every 0.5, scale 1 clips to 6 and keeps the rest."""
    codes, scales = np.zeros((1, 16), np.uint8), np.array([[0x3A, 0x38]], np.uint8)
    codes[0, 0], codes[0, 8:] = 7, 0x11
    q = hb.QuantizedTensor("nvfp4", (1, 32), codes, scales, stored_scale=1.0, contract="modelopt")
    values = np.asarray(hb.dequantize(q))[0].tolist()
    assert values == [7.5, *15 * [0], *16 * [0.5]]
    result, report = hb.cast(q, "mxfp4")
    assert np.asarray(hb.dequantize(result))[0].tolist() == [6, *values[1:]]
    assert report.squared_error == 2.25


@pytest.mark.parametrize("chunk", [1, 40, 80, 1 << 20])
def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Rows that are no multiple of a chunk, in stacks; each is decoded, written and counted once."""
    mxfp4 = random_source(np.random.default_rng(3), 20, (3, 3, 40))
    nvfp4 = hb.quantize(gaussian(9, 40).reshape(3, 3, 40), "nvfp4", "modelopt")
    wanted = [hb.cast(mxfp4, "bf16"), hb.cast(nvfp4, "mxfp4"), hb.cast(nvfp4, "mxfp4", "requantize")]
    lossy = hb.cast(mxfp4, "nvfp4")[1]
    for module in ("measure", "to_bfloat16", "to_mxfp4"):
        monkeypatch.setattr(f"halfbyte.casting.{module}.CHUNK", chunk)
    values, report = hb.cast(mxfp4, "bf16")
    assert_same_bits(values, wanted[0][0])
    assert report == wanted[0][1]
    assert hb.cast(mxfp4, "nvfp4")[1] == lossy
    for algorithm, (result, same) in zip(("optimal", "requantize"), wanted[1:], strict=True):
        found, report = hb.cast(nvfp4, "mxfp4", algorithm)
        assert (found.shape, np.asarray(found.codes).shape, np.asarray(found.scales).shape) == (
            (3, 3, 40), (3, 3, 20), (3, 3, 2)
        )  # fmt: skip
        assert_same_bits(found.codes, result.codes)
        assert_same_bits(found.scales, result.scales)
        assert report == same


def test_the_row_of_a_value_that_mxfp4_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.casting.to_mxfp4.CHUNK", 64)
    q = hb.quantize(gaussian(6, 32), "nvfp4", "modelopt")
    scales = np.asarray(q.scales).copy()
    scales[5, 1] = 0x7F
    with pytest.raises(hb.InputError, match=r"^w of shape \(6, 32\) decodes to NaN or Inf near row 4; MXFP4 has"):
        hb.cast(dataclasses.replace(q, scales=scales), "mxfp4", name="w")


@pytest.mark.parametrize(
    ("value", "byte", "code"),
    [
        # the largest power of two below 2/7 of the value: 4 or 6 times it, or 5 rounded to even; at 7/2 the one below
        (1.0, 125, 6), (1.25, 125, 6), (6.0, 127, 7), (6.5, 127, 7), (3.5, 126, 7), (3.625, 127, 6), (0.875, 124, 7),
        (2.0**-127, 0, 2), (1.5 * 2.0**-127, 0, 3), (6 * 2.0**-127, 0, 7), (7 * 2.0**-127, 0, 7),
        (7.25 * 2.0**-127, 1, 6), (2.0**127, 252, 6), (3.4e38, 253, 5),
    ],
)  # fmt: skip
def test_the_scale_of_one_value(value: float, byte: int, code: int) -> None:
    """Of equals the larger scale. No scale and no code have a smaller error."""
    values = np.zeros((1, 32), np.float32)
    values[0, 3] = -value
    result = to_mxfp4._best(values, hb.contracts.ocp())
    offered = [c * 2.0 ** (k - 127) for k in range(255) for c in E2M1_VALUES if c * 2.0 ** (k - 127) < 2.0**128]
    got = -float(np.asarray(hb.dequantize(result))[0, 3])
    assert abs(got - float(np.float32(value))) == min(abs(entry - float(np.float32(value))) for entry in offered)
    assert (int(np.asarray(result.scales)[0, 0]), int(np.asarray(result.codes)[0, 1] >> 4)) == (byte, code + 8)
