"""QuantizedTensor: made from bytes and names, compared, moved, sliced, swizzled; one fact for the tensor scale."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.layouts.swizzle import swizzle, unswizzle
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(6, 64)
T = torch.from_numpy(X)
KINDS = [X, T]


def remade(q: hb.QuantizedTensor, **changes: Any) -> hb.QuantizedTensor:
    given = {"format": q.format.name, "contract": q.contract.name, "stored_scale": q.stored_scale} | changes
    return hb.QuantizedTensor(shape=q.shape, codes=q.codes, scales=q.scales, **given)


# --- one fact ---


@pytest.mark.parametrize("x", KINDS, ids=["numpy", "torch"])
@pytest.mark.parametrize(
    ("contract", "format"),
    [
        (name, format)
        for name, make in hb.contracts.CONTRACTS.items()
        for format, rule in make().rules.items()
        if not isinstance(rule, hb.contracts.DecodeRule)
    ],
)
def test_names_and_the_derived_global_scale(x: Any, contract: str, format: str) -> None:
    """A tensor made from names and bytes has the global scale that the kernels gave, bit for bit."""
    q = hb.quantize(x, format, contract, method="amax")
    made = remade(q)
    assert made == q
    if q.global_scale is None:
        assert made.global_scale is None
    else:
        assert made.global_scale is not None
        assert_same_bits(np.asarray(made.global_scale), np.asarray(q.global_scale))
    assert_same_bits(made.dequantize(), hb.dequantize(q))


@pytest.mark.parametrize("method", ["amax", "four_six:mse:256", "optimal"])
def test_rows_and_methods_derive_too(method: str) -> None:
    for scaling in ("tensor", "row"):
        if (scaling, method) == ("row", "optimal"):
            continue
        q = hb.quantize(T, "nvfp4", method=method, scaling=scaling)
        made = remade(q, method=method)
        assert_same_bits(made.global_scale, q.global_scale)  # type: ignore[arg-type]


def test_a_replaced_stored_scale_changes_both() -> None:
    q = hb.quantize(T, "nvfp4", "modelopt")
    stored: Any = q.stored_scale
    multiplier: Any = q.global_scale
    values: Any = hb.dequantize(q)
    doubled: Any = dataclasses.replace(q, stored_scale=stored * 2)
    assert_same_bits(doubled.global_scale, multiplier * 2)
    assert_same_bits(doubled.dequantize(), values * 2)


@pytest.mark.parametrize("x", KINDS, ids=["numpy", "torch"])
def test_a_global_scale_that_contradicts(x: Any) -> None:
    q = hb.quantize(x, "nvfp4", "compressed_tensors")
    assert remade(q, global_scale=q.global_scale) == q
    with pytest.raises(hb.InputError, match="global_scale 3 contradicts stored_scale: contract compressed_tensors"):
        remade(q, global_scale=3.0)
    with pytest.raises(hb.InputError, match=r"mxfp4 under contract ocp\(\) has no global scale; leave it out"):
        remade(hb.quantize(x, "mxfp4"), global_scale=1.0)


def test_a_stored_scale_where_none_is_stored() -> None:
    """It would be kept, saved and compared, and never read."""
    for q in (hb.quantize(T, "mxfp4"), hb.quantize(T, "nvfp4", "qwantize")):
        message = rf"contract {q.contract.name}\(.*\) stores no scale with {q.format.name}; leave stored_scale out"
        with pytest.raises(hb.InputError, match=message):
            remade(q, stored_scale=1.0)


def test_a_global_scale_alone() -> None:
    q = hb.quantize(T, "nvfp4", "modelopt")
    assert remade(q, stored_scale=None, global_scale=q.global_scale) == q
    other = hb.quantize(T, "nvfp4")
    with pytest.raises(hb.InputError, match="stores the amax, not the global scale; give it as stored_scale"):
        remade(other, stored_scale=None, global_scale=other.global_scale)


# --- errors ---


def test_a_missing_stored_scale() -> None:
    lacking = remade(hb.quantize(T, "nvfp4"), stored_scale=None)
    message = r"and the tensor has none \(it is the amax\).*give stored_scale"
    with pytest.raises(hb.InputError, match=message):
        lacking.dequantize()
    with pytest.raises(hb.InputError, match=message):
        lacking.global_scale  # noqa: B018


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "mxfp5"}, "unknown format 'mxfp5'; known: mxfp4, mxfp8, nvfp4"),
        ({"contract": "nobody"}, "unknown contract 'nobody'"),
        ({"contract": None}, 'needs a contract, which says what stored_scale means: contract="modelopt"'),
        ({"method": "best"}, "unknown method 'best'"),
        ({"method": "four_six:huge"}, "unknown 4over6 error 'huge'"),
        ({"stored_scale": "1"}, "stored_scale must be a number or a float32 array, not str"),
        ({"stored_scale": torch.zeros(5)}, r"stored_scale has shape \(5,\), but a tensor of shape \(6, 64\)"),
        ({"stored_scale": torch.zeros((), dtype=torch.float64)}, "stored_scale must be float32, not float64"),
        ({"codes": torch.zeros(6, 32)}, "codes must be uint8 or float4_e2m1fn_x2 or float4_e2m1fn, not float32"),
        ({"scales": torch.zeros(6, 4).to(torch.float8_e5m2)}, "scales must be uint8 or float8_e4m3fn, not float8_e5m2"),
        ({"codes": torch.zeros(6, 31, dtype=torch.uint8)}, r"needs codes of shape \(6, 32\), got \(6, 31\)"),
        ({"codes": [1, 2]}, "codes must be a numpy array or a torch tensor, not list"),
    ],
)
def test_errors(changes: dict[str, Any], message: str) -> None:
    q = hb.quantize(T, "nvfp4")
    parts: dict[str, Any] = {
        "format": "nvfp4", "shape": q.shape, "codes": q.codes, "scales": q.scales, "stored_scale": q.stored_scale,
        "contract": "transformer_engine",
    }  # fmt: skip
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.QuantizedTensor(**parts | changes)


# --- typed views ---


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "mxfp8"])
def test_float_views_are_their_bytes(format: str) -> None:
    q = hb.quantize(T, format)
    codes: Any = q.codes
    wanted = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
    made = hb.QuantizedTensor(
        format, q.shape, codes.view(wanted), q.scales_as_float8, None, q.stored_scale, q.contract, q.method
    )
    assert made == q
    n = q.to("numpy")
    numpy = hb.QuantizedTensor(format, n.shape, n.codes, n.scales_as_float8, None, n.stored_scale, n.contract)
    assert numpy == q


def test_ml_dtypes_float4_is_packed() -> None:
    values = np.array([[0.5, -6.0, 3.0, 0.0] * 8], np.float32)
    codes = values.astype(ml_dtypes.float4_e2m1fn)
    q = hb.QuantizedTensor("mxfp4", (1, 32), codes, np.full((1, 1), 127, np.uint8))
    assert_same_bits(q.dequantize(), values)
    with pytest.raises(hb.InputError, match="codes of dtype float4_e2m1fn have the tensor's shape"):
        hb.QuantizedTensor("mxfp4", (1, 64), codes, np.full((1, 2), 127, np.uint8))


# --- comparison, moves, facts ---


def test_equality_is_a_bool_of_bits_and_meaning() -> None:
    q = hb.quantize(T, "nvfp4")
    assert (q == hb.quantize(X, "nvfp4")) is True
    assert hash(q) == hash(hb.quantize(X, "nvfp4"))
    codes: Any = q.codes
    stored: Any = q.stored_scale
    changed = dataclasses.replace(q, codes=codes ^ 1)
    assert (q == changed) is False
    assert q != 3
    assert q != hb.quantize(T[:3], "nvfp4")
    assert q != hb.quantize(T, "mxfp4")
    assert q != dataclasses.replace(q, stored_scale=stored * 2)
    # the same bytes under a contract that stores a multiplier mean other values
    assert q != remade(q, contract="modelopt")
    # the options of a contract that do not change decoding do not count, code 8 as +0.0 or -0.0 does
    other = hb.quantize(T, "mxfp4", "torchao")
    assert other == remade(other, contract=hb.contracts.torchao(scaling_mode="rceil"))
    third = hb.quantize(T, "nvfp4", "modelopt")
    assert third != remade(third, contract="torchao")
    # the amax means another multiplier if it stands for 256·6
    assert q != remade(q, method="four_six:mse:256")


def test_facts() -> None:
    q = hb.quantize(T, "nvfp4")
    assert q.nbytes == 6 * 32 + 6 * 4 + 4
    assert q.device == torch.device("cpu")
    assert q.to("numpy").device == "numpy"
    assert repr(q) == (
        "QuantizedTensor(nvfp4, shape=(6, 64), contract=transformer_engine(), method=amax, torch on cpu, 220 bytes)"
    )
    assert "numpy, 204 bytes" in repr(hb.quantize(X, "mxfp4"))
    for dtype in (torch.float32, torch.bfloat16):
        assert_same_bits(q.dequantize(dtype), hb.dequantize(q, dtype))
    assert q.error(T).squared == hb.error(q, T).squared


def test_moving_shares_memory_and_keeps_everything() -> None:
    q = hb.quantize(T, "nvfp4", "modelopt", "four_six:mse:256")
    n = q.to("numpy")
    assert isinstance(n.codes, np.ndarray)
    assert np.shares_memory(n.codes, q.codes.numpy())  # type: ignore[union-attr]
    back = n.to(torch.device("cpu"))
    assert (back == q, back.contract == q.contract, back.method == q.method) == (True, True, True)
    assert_same_bits(back.dequantize(), q.dequantize())
    meta: Any = q.to("meta")
    assert meta.codes.is_meta
    assert meta.stored_scale.is_meta


# --- rows ---


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("scaling", ["tensor", "row", "expert"])
def test_rows(kind: str, scaling: Any) -> None:
    x: Any = gaussian(12, 32).reshape(4, 3, 32)
    x = torch.from_numpy(x) if kind == "torch" else x
    q = hb.quantize(x, "nvfp4", scaling=scaling)
    values: Any = hb.dequantize(q)
    for index in (2, -1, slice(1, 3), (slice(None), 1), (1, slice(0, 2)), (3, 2), (..., 1, slice(None)), slice(0, 0)):
        part = q[index]
        assert_same_bits(np.ascontiguousarray(part.dequantize()), np.ascontiguousarray(values[index]))
        if part.global_scale is not None and 0 not in part.shape:
            remade_part = dataclasses.replace(part)
            assert_same_bits(np.asarray(remade_part.global_scale), np.asarray(part.global_scale))
    assert [each.shape for each in q] == [(3, 32)] * 4  # type: ignore[attr-defined]


def test_square_tiles_and_mx_by_rows() -> None:
    x = torch.from_numpy(gaussian(32, 32))
    for q in (hb.quantize(x, "nvfp4", tile=(16, 16)), hb.quantize(x, "mxfp4"), hb.quantize(x, "mxfp8")):
        assert_same_bits(q[5:9].dequantize(), q.dequantize()[5:9])


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ((0, 0), "the last axis is cut into blocks and stays whole"),
        ((slice(None), slice(0, 16)), "the last axis is cut into blocks"),
        ([1, 2], "rows are taken by integers and slices, not list"),
        (True, "rows are taken by integers and slices, not bool"),
        (slice(None, None, -1), "a step must be positive"),
        ((..., ...), "only one ... is possible"),
        (np.array([0, 1]), "rows are taken by integers and slices, not ndarray"),
        (np.arange(6) > 2, "rows are taken by integers and slices, not ndarray"),
        ((torch.tensor([0, 1]), slice(None)), "rows are taken by integers and slices, not Tensor"),
        ((slice(None), np.array([0, 1])), "the last axis is cut into blocks and stays whole"),
    ],
)
def test_other_indices_are_refused(index: Any, message: str) -> None:
    with pytest.raises(hb.HalfbyteError, match=message):
        hb.quantize(T, "nvfp4")[index]
    with pytest.raises(IndexError):
        hb.quantize(T, "nvfp4")[6]


# --- swizzled scales ---


@pytest.mark.parametrize("shape", [(6, 64), (130, 96), (2, 129, 64), (2, 3, 5, 32), (32,)])
def test_swizzled_scales(shape: tuple[int, ...]) -> None:
    q = hb.quantize(torch.randn(*shape), "nvfp4")
    got, numpy = q.swizzled_scales(), q.to("numpy").swizzled_scales()
    assert isinstance(got, torch.Tensor)
    assert_same_bits(got, numpy)
    scales: Any = q.scales.reshape(-1, *q.scales.shape[-2:]) if len(shape) > 1 else q.scales[None, None]
    each = [swizzle(np.asarray(matrix)) for matrix in scales]
    assert_same_bits(got.reshape(-1), np.concatenate(each))
    assert_same_bits(unswizzle(got, (1, *shape[:-1], scales.shape[-1])).reshape(-1), q.scales.reshape(-1))


def test_all_parts_are_of_one_kind() -> None:
    codes, scales = np.zeros((2, 16), np.uint8), np.full((2, 2), 0x38, np.uint8)
    mixed: list[tuple[Any, Any]] = [(torch.as_tensor(codes), scales), (codes, torch.as_tensor(scales))]
    for one, other in mixed:
        with pytest.raises(hb.InputError, match=r"codes are a .* and scales a .*; give both as numpy arrays or both"):
            hb.QuantizedTensor("nvfp4", (2, 32), one, other, stored_scale=1.0, contract="modelopt")
    for kind in (np.asarray, torch.as_tensor):
        for as_stored in (np.asarray, torch.as_tensor):  # a scale is one number: it is taken over
            stored = as_stored(np.float32(0.5))
            q = hb.QuantizedTensor(
                "nvfp4", (2, 32), kind(codes), kind(scales), stored_scale=stored, contract="modelopt"
            )
            assert type(q.stored_scale) is type(q.codes)
            assert float(np.asarray(q.global_scale)) == 0.5


# --- numbers per row, in any shape of as many ---


@pytest.mark.parametrize("shape", [(6,), (2, 3), (6, 1), (2, 3, 1)])
def test_numbers_per_row_may_have_another_shape(shape: tuple[int, ...]) -> None:
    x = T.reshape(2, 3, 64)
    q = hb.quantize(x, "nvfp4", scaling="row")
    stored = q.stored_scale.reshape(shape)  # type: ignore[union-attr]
    again = hb.QuantizedTensor("nvfp4", q.shape, q.codes, q.scales, stored_scale=stored, contract=q.contract)
    assert again == q
    for index in (0, slice(1, 2), (1, 2), (slice(None), 1)):
        assert_same_bits(again[index].dequantize(), q.dequantize()[index])


@pytest.mark.parametrize(
    ("shape", "index", "said"),
    [
        ((32,), 0, "the only axis is cut into blocks and stays whole; dequantize first"),
        ((2, 32), (0, 1), "the last axis is cut into blocks and stays whole; index the axis before it, or dequantize"),
        ((1, 2, 32), (0, 0, 1), "index the 2 axes before it, or dequantize first"),
    ],
)
def test_the_axis_of_the_blocks_is_not_indexed(shape: tuple[int, ...], index: Any, said: str) -> None:
    q = hb.quantize(np.ones(shape, np.float32), "mxfp4")
    with pytest.raises(hb.InputError, match=said):
        q[index]
