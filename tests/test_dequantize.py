"""dequantize() and the global scale: each contract is compared with float32 arithmetic written out here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.testing import assert_same_bits
from tests.samples import F32, codes_of, e2m1, f32, float8, gaussian

f = np.float32
ONE, C = f(1), f(6 * 448)


def bf16(x: Any) -> Any:
    return f(x.astype(ml_dtypes.bfloat16))


# name → (contract, stored scale from A, global scale from A), on float32 scalars, one rounding per operation
Number = Callable[[Any], Any]
SCALES: dict[str, tuple[hb.contracts.Contract, Number, Number]] = {
    "transformer_engine": (contracts.transformer_engine(), lambda a: a, lambda a: a / C),
    "modelopt": (contracts.modelopt(), lambda a: a / C, lambda a: a / C),
    "torchao": (contracts.torchao(), lambda a: a / C, lambda a: a / C),
    "miles": (contracts.miles(), lambda a: ONE / (C / a), lambda a: ONE / (C / a)),
    "compressed_tensors": (contracts.compressed_tensors(), lambda a: (ONE / a) * C, lambda a: ONE / ((ONE / a) * C)),
    "flashinfer ref": (contracts.flashinfer(), lambda a: (ONE / a) * C, lambda a: ONE / ((ONE / a) * C)),
    "flashinfer te": (contracts.flashinfer(mode="te"), lambda a: a, lambda a: a / C),
    "flashinfer 4over6": (contracts.flashinfer(mode="4over6"), lambda a: ONE / (C / a), lambda a: ONE / (C / a)),
    "vllm": (contracts.vllm(), lambda a: (ONE / a) * C, lambda a: ONE / ((ONE / a) * C)),
    "vllm given": (contracts.vllm(global_scale=3.0), lambda a: f(3), lambda a: ONE / f(3)),
    "fouroversix": (contracts.fouroversix(), lambda a: a, lambda a: a / C),
    "fouroversix static_4": (contracts.fouroversix(rule="static_4"), lambda a: a, lambda a: a / f(4 * 448)),
    "fouroversix mse": (contracts.fouroversix(rule="mse"), lambda a: a, lambda a: a / f(6 * 256)),
    "modelopt four_over_six": (
        contracts.modelopt(mode="four_over_six"),
        lambda a: a / f(6 * 256),
        lambda a: a / f(6 * 256),
    ),
    "transformer_engine 256": (
        contracts.transformer_engine(nvfp4_use_4over6=True, nvfp4_e4m3_max=256),
        lambda a: a,
        lambda a: a / f(6 * 256),
    ),
}

# value of an element from (q, S, stored, c)
DECODE: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "amax": lambda q, s, stored, c: ((q * s) * stored) / c,
    "multiplier": lambda q, s, stored, c: q * (s * stored),
    "divisor": lambda q, s, stored, c: q * (s / stored),
    "reciprocal": lambda q, s, stored, c: q * (s * (ONE / stored)),
}
FORMULA = {
    "transformer_engine": ("amax", C),
    "transformer_engine 256": ("amax", f(1536)),
    "flashinfer te": ("amax", C),
    "fouroversix": ("amax", C),
    "fouroversix static_4": ("amax", f(1792)),
    "fouroversix mse": ("amax", f(1536)),
    "modelopt": ("multiplier", C),
    "modelopt four_over_six": ("multiplier", C),
    "torchao": ("multiplier", C),
    "miles": ("multiplier", C),
    "flashinfer 4over6": ("multiplier", C),
    "compressed_tensors": ("divisor", C),
    "vllm": ("divisor", C),
    "vllm given": ("divisor", C),
    "flashinfer ref": ("reciprocal", C),
}


def value(array: Any) -> Any:
    assert array.shape == ()
    return to_numpy(array)[()]


@pytest.mark.parametrize("name", SCALES)
def test_global_and_stored_scale(name: str) -> None:
    contract, stored, multiplier = SCALES[name]
    for seed in range(20):
        x = gaussian(2, 32, seed=seed)
        amax = np.abs(x).max()
        q = hb.quantize(x, "nvfp4", contract)
        assert value(q.stored_scale) == stored(amax)
        assert value(q.global_scale) == multiplier(amax)


def test_the_meanings_differ() -> None:
    """A/2688, 1/(2688/A) and 1/((1/A)·2688) differ in the last bit, so none can replace another."""
    amax = np.linspace(1, 2, 1000, dtype=np.float32)
    quotient, inverse, twice = amax / C, ONE / (C / amax), ONE / ((ONE / amax) * C)
    for one, other in ((quotient, inverse), (quotient, twice), (inverse, twice)):
        assert np.count_nonzero(one != other) > 100


def test_global_scale_with_sixteen_bit_statistics() -> None:
    """compressed-tensors rounds 1/A and the product to the input's dtype, unless its statistics are float32."""
    x = gaussian(2, 32).astype(ml_dtypes.bfloat16)
    amax = np.abs(x.astype(np.float32)).max()
    g = bf16(bf16(ONE / amax) * C)
    q = hb.quantize(x, "nvfp4", "compressed_tensors")
    assert (value(q.stored_scale), value(q.global_scale)) == (g, ONE / g)
    wide = hb.quantize(x, "nvfp4", contracts.compressed_tensors(minmax="fp32"))
    assert value(wide.stored_scale) == f(f(ONE / amax) * C)


@pytest.mark.parametrize("contract", [contracts.qwantize(), contracts.torchao(two_level=False)], ids=repr)
def test_single_level_contracts_multiply_by_one(contract: hb.contracts.Contract) -> None:
    x = gaussian(2, 32)
    q = hb.quantize(x, "nvfp4", contract)
    assert value(q.global_scale) == 1
    assert q.stored_scale is None
    decoded = e2m1(codes_of(to_numpy(q.codes))) * np.repeat(float8(to_numpy(q.scales), "e4m3"), 16, axis=-1)
    assert_same_bits(hb.dequantize(q), decoded)


@pytest.mark.parametrize("name", SCALES)
def test_decoded_values(name: str) -> None:
    formula, top = FORMULA[name]
    contract = SCALES[name][0]
    x = gaussian(4, 64)
    x[0, :4] = 0.0, -0.0, -1e-4, 1e-4
    q = hb.quantize(x, "nvfp4", contract)
    elements = e2m1(codes_of(to_numpy(q.codes)))
    if name.startswith("modelopt"):
        elements = elements + f(0)  # its code 8 decodes to +0.0
    scales = np.repeat(float8(to_numpy(q.scales), "e4m3"), 16, axis=-1)
    expected = DECODE[formula](elements, scales, value(q.stored_scale), top)
    assert_same_bits(hb.dequantize(q), expected.astype(np.float32), inputs=x)


@pytest.mark.parametrize("name", sorted(set(SCALES) - {"vllm given"}))  # its factor does not come from the tensor
def test_decoding_is_near_the_input(name: str) -> None:
    """The error of an element is at most half a step at 6 (1/6 of the block's amax) plus the rounding of the scale."""
    x = gaussian(8, 64)
    error = np.abs(to_numpy(hb.dequantize(hb.quantize(x, "nvfp4", SCALES[name][0]))) - x).reshape(8, 4, 16)
    amax = np.abs(x).reshape(8, 4, 16).max(axis=-1, keepdims=True)
    assert np.all(error <= amax * f(1 / 4 if "static_4" in name or "four" in name else 1 / 5))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_decoded_values_of_mx(format: str) -> None:
    x = gaussian(4, 64)
    q = hb.quantize(x, format)
    codes = to_numpy(q.codes)
    elements = e2m1(codes_of(codes)) if format == "mxfp4" else float8(codes, "e4m3")
    assert_same_bits(hb.dequantize(q), elements * np.repeat(float8(to_numpy(q.scales), "e8m0"), 32, axis=-1))


def test_row_scaling_decodes_row_by_row() -> None:
    x = gaussian(2, 3, 32) * f32(1, 100, 1e-3)[None, :, None]
    q = hb.quantize(x, "nvfp4", scaling="row")
    rows = [[hb.dequantize(hb.quantize(row, "nvfp4")) for row in matrix] for matrix in x]
    assert_same_bits(hb.dequantize(q), np.array(rows))


# --- dtype ---

SPELLINGS: dict[str, list[Any]] = {
    "float32": ["float32", "fp32", np.float32, np.dtype("float32"), torch.float32],
    "float16": ["float16", "fp16", np.float16, np.dtype("float16"), torch.float16],
    "bfloat16": ["bfloat16", "bf16", ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16), torch.bfloat16],
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_dtype_argument(name: str) -> None:
    x = gaussian(2, 32)
    numpy_dtype: Any = SPELLINGS[name][2]
    a, b = hb.quantize(x, "nvfp4"), hb.quantize(torch.from_numpy(x), "nvfp4")
    expected = to_numpy(hb.dequantize(a)).astype(numpy_dtype)  # one more rounding
    for spelling in SPELLINGS[name]:
        assert_same_bits(hb.dequantize(a, spelling), expected)
        tensor = hb.dequantize(b, dtype=spelling)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == SPELLINGS[name][4]
        assert_same_bits(tensor, expected)


def test_float16_overflow_is_inf() -> None:
    q = hb.quantize(f32(*[1e6] * 16), "nvfp4")
    assert np.isinf(to_numpy(hb.dequantize(q, "float16"))).all()


@pytest.mark.parametrize("dtype", ["float64", "int8", np.float64, torch.float64, np.int32])
def test_unknown_dtype_lists_the_known(dtype: Any) -> None:
    q = hb.quantize(gaussian(1, 16), "nvfp4")
    with pytest.raises(hb.UnknownNameError, match=r"unknown output dtype '.*'; known: bf16, bfloat16, float16"):
        hb.dequantize(q, dtype)


# --- tensors built by hand ---


def test_decode_only_contracts() -> None:
    """transformers decodes byte 255 as 2**128; in the format it is NaN. gguf ignores the sign of a scale."""
    codes, scales = np.full((1, 16), 0x21, np.uint8), np.array([[255]], np.uint8)
    q = hb.QuantizedTensor(hb.FORMATS["mxfp4"], (1, 32), codes, scales, None, None, contracts.transformers())
    assert to_numpy(hb.dequantize(q))[0, :2].tolist() == [2.0**127, np.inf]
    assert np.isnan(to_numpy(hb.dequantize(dataclasses.replace(q, contract=contracts.ocp())))).all()
    nvfp4 = hb.QuantizedTensor(
        hb.FORMATS["nvfp4"], (1, 16), codes[:, :8], np.array([[0xB8]], np.uint8), None, None, contracts.gguf()
    )
    assert to_numpy(hb.dequantize(nvfp4))[0, :2].tolist() == [0.5, 1.0]


def test_a_stored_scale_is_needed() -> None:
    q = hb.quantize(gaussian(1, 16), "nvfp4", "modelopt")
    with pytest.raises(hb.InputError, match="decodes nvfp4 with a stored scale, and the tensor has none"):
        hb.dequantize(dataclasses.replace(q, stored_scale=None))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"codes": np.zeros((2, 15), np.uint8)},
            r"shape \(2, 32\) needs codes of shape \(2, 16\), got \(2, 15\)",
        ),
        (
            {"scales": np.zeros((2, 3), np.uint8)},
            r"shape \(2, 32\) needs scales of shape \(2, 2\), got \(2, 3\)",
        ),
        ({"shape": (32, 2)}, r"nvfp4 of shape \(32, 2\) needs codes of shape \(32, 1\), got \(2, 16\)"),
    ],
)
def test_parts_must_fit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(hb.InputError, match=message):
        dataclasses.replace(hb.quantize(gaussian(2, 32), "nvfp4"), **changes)


def nan_scales() -> F32:
    x = gaussian(1, 32)
    x[0, 0] = np.nan
    return x


def test_nan_scales_decode_to_nan() -> None:
    assert np.isnan(to_numpy(hb.dequantize(hb.quantize(nan_scales(), "nvfp4")))).all()
