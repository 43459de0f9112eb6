"""quantize(): blocks computed by hand, kinds of arrays, shapes, tiles, rows, shared amaxes, methods."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.testing import assert_same_bits
from tests.samples import F32, f32, gaussian

KINDS: dict[str, tuple[Any, Any]] = {
    "float32": (np.float32, torch.float32),
    "float16": (np.float16, torch.float16),
    "bfloat16": (ml_dtypes.bfloat16, torch.bfloat16),
}
FORMATS = ["nvfp4", "mxfp4", "mxfp8"]


def same(a: hb.QuantizedTensor, b: hb.QuantizedTensor, *, global_scale: bool = True) -> None:
    """Compare every part of two results bit for bit."""
    assert a.shape == b.shape
    for part in ("codes", "scales", *(["global_scale", "stored_scale"] if global_scale else [])):
        left, right = getattr(a, part), getattr(b, part)
        if left is None or right is None:
            assert left is None
            assert right is None
        else:
            assert_same_bits(left, right)


# --- by hand ---


def test_nvfp4_by_hand() -> None:
    """A = 21, so enc = 2688/21 = 128 and dec = 2**-7; enc·sixth = 21.333334.

    Block 1: v = 21, 21·21.333334 = 448.00001 → 448, byte 0x7E. S·dec = 3.5, y = x/3.5.
    Block 2: v = 12, 12·21.333334 = 256.00003 → 256, byte 0x78. S·dec = 2, y = x/2, exactly: its ties are ties.
    """
    first = [21, -21, 10.5, 3.5, -7, 0, 14, 1.75, 5.25, 0, 0, 0, 0, 0, 0, 0]
    #  y       6   -6     3    1  -2  0   4  0.5   1.5
    second = [12, 0.5, 1.5, -2.5, 3.5, 5, 7, -10, -0.0, -0.25, 1, 2, 3, 4, 6, 8]
    # y        6 0.25 0.75 -1.25 1.75 2.5 3.5 -5  -0  -0.125 0.5 1 1.5 2 3 4
    q = hb.quantize(f32(*first, *second), "nvfp4", contract="transformer_engine", method="amax")
    assert to_numpy(q.codes).tolist() == [
        *[0xF7, 0x25, 0x0C, 0x16, 0x03, 0x00, 0x00, 0x00],  # even element in the low nibble: 7 | 15 << 4, …
        *[0x07, 0xA2, 0x44, 0xE6, 0x80, 0x21, 0x43, 0x65],
    ]
    assert to_numpy(q.scales).tolist() == [0x7E, 0x78]
    assert (to_numpy(q.stored_scale).item(), to_numpy(q.global_scale).item()) == (21.0, 2.0**-7)  # type: ignore[arg-type]
    decoded = [12, 0, 2, -2, 4, 4, 8, -8, 0.0, -0.0, 1, 2, 3, 4, 6, 8]
    assert_same_bits(hb.dequantize(q), f32(*first, *decoded))


def test_mxfp4_by_hand() -> None:
    """v = 7: floor(log2 7) - 2 = 0, byte 127, scale 1. 7 saturates to 6; -0.0 keeps its sign under ocp."""
    x = f32(7, -0.0, 0.25, 0.75, -2.5, -0.1, 5, 1, *[0.0] * 24)
    q = hb.quantize(x, "mxfp4")
    assert to_numpy(q.codes).tolist() == [0x87, 0x20, 0x8C, 0x26, *[0] * 12]
    assert to_numpy(q.scales).tolist() == [127]
    assert q.global_scale is None
    assert q.stored_scale is None
    assert_same_bits(hb.dequantize(q)[:8], f32(6, -0.0, 0, 1, -2, -0.0, 4, 1))


def test_mxfp8_by_hand() -> None:
    """v = 500: floor(log2 500) - 8 = 0. 500 saturates to 448 (0x7E); 17 is a tie between 16 and 18 (even: 16)."""
    q = hb.quantize(f32(500, 17, -1, 0.001, *[0.0] * 28), "mxfp8")
    assert to_numpy(q.codes)[:4].tolist() == [0x7E, 0x58, 0xB8, 0x01]  # 0.001 is 0.512 steps of 2**-9
    assert to_numpy(q.scales).tolist() == [127]


# --- kinds of arrays ---


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", KINDS)
def test_numpy_and_torch_give_the_same_bits(kind: str, format: str) -> None:
    numpy_dtype, torch_dtype = KINDS[kind]
    x = gaussian(3, 4, 64).astype(numpy_dtype)
    tensor = torch.from_numpy(x.astype(np.float32)).to(torch_dtype)
    a, b = hb.quantize(x, format), hb.quantize(tensor, format)
    for part in ("codes", "scales", "global_scale", "stored_scale"):
        left, right = getattr(a, part), getattr(b, part)
        if left is None:
            assert right is None
            continue
        assert isinstance(left, np.ndarray)
        assert isinstance(right, torch.Tensor)
        assert right.device == tensor.device
        assert right.dtype == (torch.float32 if "scale" in part and part != "scales" else torch.uint8)
        assert_same_bits(left, right)
    assert_same_bits(hb.dequantize(a), hb.dequantize(b))
    assert isinstance(hb.dequantize(b), torch.Tensor)
    assert isinstance(hb.dequantize(a), np.ndarray)


@pytest.mark.parametrize("kind", KINDS)
def test_widening_changes_nothing(kind: str) -> None:
    """Contracts with float32 statistics give the same result for a 16-bit tensor and its float32 copy."""
    x = gaussian(4, 64).astype(KINDS[kind][0])
    same(hb.quantize(x, "nvfp4"), hb.quantize(x.astype(np.float32), "nvfp4"))


def test_scales_as_float8() -> None:
    x = gaussian(2, 64)
    for format, numpy_dtype, torch_dtype in (
        ("nvfp4", ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
        ("mxfp4", ml_dtypes.float8_e8m0fnu, torch.float8_e8m0fnu),
    ):
        a, b = hb.quantize(x, format), hb.quantize(torch.from_numpy(x), format)
        view, tensor = a.scales_as_float8, b.scales_as_float8
        assert isinstance(view, np.ndarray)
        assert isinstance(tensor, torch.Tensor)
        assert (view.dtype, tensor.dtype) == (numpy_dtype, torch_dtype)
        assert np.shares_memory(view, to_numpy(a.scales))
        assert tensor.data_ptr() == b.scales.data_ptr()  # type: ignore[union-attr]
        assert_same_bits(tensor.float(), view.astype(np.float32))


def test_tensors_that_require_grad() -> None:
    x = torch.from_numpy(gaussian(2, 32)).requires_grad_()
    q = hb.quantize(x, "nvfp4")
    same(q, hb.quantize(x.detach(), "nvfp4"))
    assert not hb.dequantize(q).requires_grad  # type: ignore[union-attr]


@pytest.mark.parametrize("contract", sorted(set(contracts.CONTRACTS) - {"transformers"}))
def test_input_is_not_modified(contract: str) -> None:
    made = contracts.CONTRACTS[contract]()
    format = "nvfp4" if contract not in ("gguf", "ocp") else "mxfp4"
    for x in (gaussian(2, 64), gaussian(2, 64).astype(np.float16)):
        before = x.copy()
        x.flags.writeable = False
        hb.dequantize(hb.quantize(x, format, made))
        assert_same_bits(x, before)
    tensor = torch.from_numpy(gaussian(2, 64))
    hb.quantize(tensor, format, made)
    assert_same_bits(tensor, gaussian(2, 64))


# --- shapes ---


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("shape", [(64,), (1, 64), (3, 64), (2, 3, 64), (2, 1, 3, 64)])
def test_leading_shapes(shape: tuple[int, ...], format: str) -> None:
    x = gaussian(*shape)
    q = hb.quantize(x, format)
    f = hb.get_format(format)
    assert q.shape == shape
    assert q.format == f
    assert tuple(q.codes.shape) == (*shape[:-1], 64 // f.codes_per_byte)
    assert tuple(q.scales.shape) == (*shape[:-1], 64 // f.block)
    matrix = hb.quantize(x.reshape(-1, 64), format)
    assert_same_bits(to_numpy(q.codes).reshape(-1, to_numpy(q.codes).shape[-1]), to_numpy(matrix.codes))
    assert_same_bits(hb.dequantize(q), to_numpy(hb.dequantize(matrix)).reshape(shape))


@pytest.mark.parametrize("backing", ["numpy", "torch"])
@pytest.mark.parametrize("view", ["transposed", "strided", "reversed"])
def test_views_equal_their_copies(view: str, backing: str) -> None:
    x = gaussian(64, 96)
    views = {"transposed": x.T, "strided": x[::2, ::3], "reversed": x[::-1]}
    copy = np.ascontiguousarray(views[view])
    given: Any = views[view]
    if backing == "torch":
        tensor = torch.from_numpy(x)
        given = {"transposed": tensor.T, "strided": tensor[::2, ::3], "reversed": tensor.flip(0)}[view]
    for dtype in KINDS.values():
        cast = given.astype(dtype[0]) if backing == "numpy" else given.to(dtype[1])
        got = hb.quantize(cast, "nvfp4")
        expected = hb.quantize(copy.astype(dtype[0]), "nvfp4")
        assert_same_bits(got.codes, expected.codes)
        assert_same_bits(got.scales, expected.scales)


@pytest.mark.parametrize("contract", ["transformer_engine", "modelopt", "miles", "fouroversix"])
@pytest.mark.parametrize("width", [1, 15, 17, 31, 33])
def test_ragged_width_is_padded_and_cropped(width: int, contract: str) -> None:
    x = gaussian(3, width)
    q = hb.quantize(x, "nvfp4", contract)
    assert tuple(q.codes.shape) == (3, (width + 1) // 2)
    assert tuple(q.scales.shape) == (3, -(-width // 16))
    padded = hb.quantize(np.pad(x, [(0, 0), (0, -width % 16)]), "nvfp4", contract)
    assert_same_bits(q.scales, padded.scales)
    assert_same_bits(hb.dequantize(q), to_numpy(hb.dequantize(padded))[:, :width])
    if width % 2:
        assert not np.any(to_numpy(q.codes)[:, -1] >> 4)  # an odd row ends in a zero nibble


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8"])
def test_ragged_width_of_mx(format: str) -> None:
    x = gaussian(2, 45)
    q, padded = hb.quantize(x, format), hb.quantize(np.pad(x, [(0, 0), (0, 19)]), format)
    assert_same_bits(q.scales, padded.scales)
    assert_same_bits(hb.dequantize(q), to_numpy(hb.dequantize(padded))[:, :45])


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_block_lengths(format: str) -> None:
    """A block of 32 has one scale where two blocks of 16 have two."""
    x = gaussian(2, 64)
    short, long = hb.quantize(x, format, block=16), hb.quantize(x, format, block=32)
    assert (short.scales.shape[-1], long.scales.shape[-1]) == (4, 2)
    assert (short.format.block, long.format.block) == (16, 32)
    pairs = to_numpy(short.scales).reshape(2, 2, 2).max(axis=-1)
    assert_same_bits(to_numpy(long.scales), pairs)  # scales grow with the amax, and the larger amax is the pair's


# --- tiles ---


@pytest.mark.parametrize("contract", ["transformer_engine", "fouroversix"])
@pytest.mark.parametrize("shape", [(16, 16), (32, 48), (5, 20), (17, 33)])
def test_tile_shares_one_scale(shape: tuple[int, int], contract: str) -> None:
    x = gaussian(*shape)
    q = hb.quantize(x, "nvfp4", contract, tile=(16, 16))
    rows, columns = shape
    assert tuple(q.scales.shape) == (rows, -(-columns // 16))
    # a tile laid out as one row of 256 has the same amax; with the tensor's own A the scale byte is the same
    padded = np.pad(x, [(0, -rows % 16), (0, -columns % 16)])
    amax = np.abs(padded.reshape(padded.shape[0] // 16, 16, -1, 16)).max(axis=(1, 3))
    probe = np.repeat(amax[..., None], 16, axis=-1).reshape(amax.shape[0], -1)
    per_tile = to_numpy(hb.quantize(probe, "nvfp4", contract, global_amax=np.abs(x).max()).scales)
    assert_same_bits(q.scales, np.repeat(per_tile, 16, axis=0)[:rows])


def test_tile_preset_by_the_contract() -> None:
    x = gaussian(32, 32)
    same(
        hb.quantize(x, "nvfp4", contracts.transformer_engine(tile=(16, 16))),
        hb.quantize(x, "nvfp4", "transformer_engine", tile=(16, 16)),
    )
    same(
        hb.quantize(x, "nvfp4", contracts.fouroversix(block_2d=True)),
        hb.quantize(x, "nvfp4", "fouroversix", tile=(16, 16)),
    )
    plain = hb.quantize(x, "nvfp4")
    same(plain, hb.quantize(x, "nvfp4", tile=(1, 16)))
    assert not np.array_equal(to_numpy(plain.scales), to_numpy(hb.quantize(x, "nvfp4", tile=(16, 16)).scales))


# --- rows and shared amaxes ---


@pytest.mark.parametrize("shape", [(32,), (4, 32), (2, 3, 32), (2, 2, 2, 32)])
def test_row_scaling_has_one_global_scale_a_row(shape: tuple[int, ...]) -> None:
    x = gaussian(*shape)
    q = hb.quantize(x, "nvfp4", scaling="row")
    assert q.global_scale is not None
    assert q.stored_scale is not None
    assert tuple(q.global_scale.shape) == tuple(q.stored_scale.shape) == shape[:-1]
    amax = np.asarray(np.abs(x).max(axis=-1))
    assert_same_bits(q.stored_scale, amax)
    assert_same_bits(q.global_scale, np.asarray(amax / np.float32(2688)))
    same(q, hb.quantize(x, "nvfp4", contracts.transformer_engine(row_scaled_nvfp4=True)))


def test_global_amax_of_several_tensors() -> None:
    """Two tensors, both quantized with the larger amax, equal the halves of their concatenation."""
    gate, up = gaussian(4, 32), 3 * gaussian(6, 32, seed=1)
    shared = max(np.abs(gate).max(), np.abs(up).max())
    whole = hb.quantize(np.concatenate([gate, up]), "nvfp4", "miles")
    parts = [hb.quantize(part, "nvfp4", "miles", global_amax=shared) for part in (gate, up)]
    assert_same_bits(np.concatenate([to_numpy(part.codes) for part in parts]), to_numpy(whole.codes))
    assert_same_bits(np.concatenate([to_numpy(part.scales) for part in parts]), to_numpy(whole.scales))
    assert whole.global_scale is not None
    for part in parts:
        assert part.global_scale is not None
        assert_same_bits(part.global_scale, whole.global_scale)
    alone = hb.quantize(gate, "nvfp4", "miles")
    assert not np.array_equal(to_numpy(alone.scales), to_numpy(parts[0].scales))


@pytest.mark.parametrize("amax", [5, 5.0, np.float32(5), f32(5), [5.0], torch.tensor(5.0), np.float16(5)])
def test_global_amax_in_every_spelling(amax: object) -> None:
    x = gaussian(2, 32)
    q = hb.quantize(x, "nvfp4", global_amax=amax)
    assert to_numpy(q.stored_scale).item() == 5.0  # type: ignore[arg-type]
    same(q, hb.quantize(x, "nvfp4", global_amax=5.0))


def test_global_amax_a_row() -> None:
    x = gaussian(2, 3, 32)
    own = np.abs(x).max(axis=-1)
    same(hb.quantize(x, "nvfp4", scaling="row"), hb.quantize(x, "nvfp4", scaling="row", global_amax=own))
    doubled = hb.quantize(x, "nvfp4", scaling="row", global_amax=2 * own.reshape(-1))
    assert_same_bits(to_numpy(doubled.stored_scale), 2 * own)  # type: ignore[arg-type]


# --- NaN ---


@pytest.mark.parametrize("contract", ["transformer_engine", "miles", "modelopt", "torchao", "vllm", "flashinfer"])
def test_nan_scale_bytes_are_0x7f(contract: str) -> None:
    x = gaussian(2, 32)
    x[0, 0] = -np.nan
    scales = to_numpy(hb.quantize(x, "nvfp4", contract).scales)
    assert np.all(scales == 0x7F)  # a NaN tensor amax reaches every block


def test_nan_block_of_mx_is_255() -> None:
    x = gaussian(2, 64)
    x[1, 40] = np.nan
    q = hb.quantize(x, "mxfp4")
    assert (to_numpy(q.scales) == 255).tolist() == [[False, False], [False, True]]
    assert np.isnan(to_numpy(hb.dequantize(q))[1, 32:]).all()


def zero_tensor() -> F32:
    return np.zeros((2, 32), np.float32)


@pytest.mark.parametrize(
    ("contract", "byte", "stored"),
    [
        ("transformer_engine", 0x00, 0.0),
        ("miles", 0x00, 2.938735877055719e-39),
        ("compressed_tensors", 0x20, 1.0),
        ("flashinfer", 0x00, float(np.finfo(np.float32).max)),
        ("fouroversix", 0x00, 0.0),
        ("modelopt", 0x7F, 0.0),
        ("torchao", 0x7F, 0.0),
        ("vllm", 0x7F, np.inf),
    ],
)
def test_zero_tensor(contract: str, byte: int, stored: float) -> None:
    """A tensor of zeros raises no error and gets the bytes of each peer."""
    q = hb.quantize(zero_tensor(), "nvfp4", contract)
    assert np.all(to_numpy(q.scales) == byte)
    assert to_numpy(q.stored_scale).item() == stored  # type: ignore[arg-type]


# --- odd arguments ---


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("threads", [0, -1, True, 1.5, "2"])
def test_threads_are_checked_whatever_the_backend(threads: Any, backend: str) -> None:
    x = gaussian(2, 32)
    with pytest.raises(hb.InputError, match="the number of threads must be a whole number of at least 1"):
        hb.quantize(x, "nvfp4", threads=threads, backend=backend)
    with pytest.raises(hb.InputError, match="the number of threads"):
        hb.dequantize(hb.quantize(x, "nvfp4"), threads=threads, backend=backend)


def test_numpy_integers_are_whole_numbers() -> None:
    x = gaussian(16, 64)
    q = hb.quantize(x, "nvfp4", block=cast(Any, np.int64(32)), threads=cast(Any, np.int64(1)))
    assert q.scales.shape == (16, 2)
    tiled = hb.quantize(x, "nvfp4", tile=cast(Any, (np.int64(16), 16)))
    assert_same_bits(tiled.codes, hb.quantize(x, "nvfp4", tile=(16, 16)).codes)


@pytest.mark.parametrize("given", [{"block": 32.0}, {"tile": (16.0, 16.0)}])
def test_floats_are_not(given: dict[str, Any]) -> None:
    with pytest.raises(hb.UnsupportedError, match="whole number"):
        hb.quantize(gaussian(16, 32), "nvfp4", **given)


def test_columns_first_and_padded() -> None:
    """numpy pads such an array without changing its order, which no kernel takes."""
    x = np.asfortranarray(gaussian(5, 64))
    for given in ({"tile": (16, 16)}, {"contract": "modelopt"}):
        ragged = x if "tile" in given else np.asfortranarray(x[:, :61])
        got = hb.quantize(ragged, "nvfp4", **cast(Any, given))
        expected = hb.quantize(ragged, "nvfp4", backend="reference", **cast(Any, given))
        assert_same_bits(got.codes, expected.codes)
        assert_same_bits(got.scales, expected.scales)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_an_amax_of_minus_zero_is_zero(backend: str) -> None:
    for amax in (-0.0, np.float32(-0.0), np.array([-0.0])):
        q = hb.quantize(gaussian(2, 32), "nvfp4", global_amax=amax, backend=backend)
        assert not np.signbit(to_numpy(cast(Any, q.global_scale)))


def test_out_that_overlaps_itself_or_is_no_tensor() -> None:
    x = gaussian(2, 32)
    q = hb.quantize(x, "nvfp4")
    room = np.zeros(34, np.uint8)
    overlapping = dataclasses.replace(q, codes=room[:32].reshape(2, 16), scales=room[30:34].reshape(2, 2))
    with pytest.raises(hb.InputError, match=r"out\.codes and out\.scales overlap"):
        hb.quantize(x, "nvfp4", out=overlapping)
    with pytest.raises(hb.InputError, match="out must be a QuantizedTensor, not str"):
        hb.quantize(x, "nvfp4", out=cast(Any, "x"))
