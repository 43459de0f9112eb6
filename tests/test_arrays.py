"""Conversion of arrays between numpy and torch, without unnecessary copies."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.arrays import float8_view, is_torch, like, output_dtype, to_numpy
from halfbyte.testing import assert_same_bits
from tests.samples import f32, gaussian, u8


def test_is_torch() -> None:
    assert is_torch(torch.zeros(1))
    assert is_torch(torch.nn.Parameter(torch.zeros(1)))
    assert not any(map(is_torch, (f32(1), 1.0, None, torch)))


def test_numpy_arrays_pass_through() -> None:
    x = f32(1)
    assert to_numpy(x) is x
    assert like(x, f32(2)) is x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.uint8])
def test_cpu_tensors_share_memory(dtype: torch.dtype) -> None:
    x = torch.zeros(3, dtype=dtype)
    view = to_numpy(x)
    x[1] = 1
    assert view.astype(np.float32).tolist() == [0, 1, 0]
    assert view.dtype == {torch.bfloat16: ml_dtypes.bfloat16}.get(dtype, view.dtype)


def test_results_share_memory_with_torch() -> None:
    array = f32(1, 2)
    tensor = like(array, torch.zeros(1))
    assert isinstance(tensor, torch.Tensor)
    array[0] = 5
    assert tensor.tolist() == [5, 2]


def test_float8_tensors_become_their_bytes() -> None:
    for dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        assert_same_bits(to_numpy(torch.tensor([0, 127, 255], dtype=torch.uint8).view(dtype)), u8(0, 127, 255))


def test_bfloat16_both_ways() -> None:
    x = gaussian(3, 5).astype(ml_dtypes.bfloat16)
    tensor = like(x, torch.zeros(1))
    assert isinstance(tensor, torch.Tensor)
    assert tensor.dtype == torch.bfloat16
    assert_same_bits(to_numpy(tensor), x)


@pytest.mark.parametrize("shape", [(), (1,), (2, 0), (2, 3)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    assert tuple(like(np.zeros(shape, np.float32), torch.zeros(1)).shape) == shape
    assert to_numpy(torch.zeros(shape)).shape == shape


def test_strided_results_become_tensors() -> None:
    x = gaussian(4, 6)
    assert_same_bits(like(x.T, torch.zeros(1)), np.ascontiguousarray(x.T))
    assert_same_bits(like(x[:, ::-1], torch.zeros(1)), np.ascontiguousarray(x[:, ::-1]))


@pytest.mark.parametrize("name", ["e4m3", "e8m0"])
def test_float8_view_copies_nothing(name: str) -> None:
    scales = u8(1, 2, 3)
    view, tensor = float8_view(scales, name), float8_view(torch.from_numpy(scales), name)
    assert isinstance(view, np.ndarray)
    assert isinstance(tensor, torch.Tensor)
    scales[0] = 9
    assert_same_bits(view.view(np.uint8), u8(9, 2, 3))
    assert_same_bits(tensor.view(torch.uint8), u8(9, 2, 3))


@pytest.mark.parametrize("value", [1.0, [1.0], None, "x", np.float32(1)])
def test_anything_else_is_refused(value: object) -> None:
    with pytest.raises(hb.InputError, match=f"expected a numpy array or a torch tensor, got {type(value).__name__}"):
        to_numpy(value)  # type: ignore[arg-type]


def test_output_dtype() -> None:
    assert output_dtype("bf16") == output_dtype(torch.bfloat16) == np.dtype(ml_dtypes.bfloat16)
    assert output_dtype(np.float16) == output_dtype(torch.float16) == np.dtype(np.float16)
    with pytest.raises(hb.UnknownNameError, match="unknown output dtype 'int8'; known: bf16, bfloat16, float16"):
        output_dtype(np.int8)
