"""quantize(): axis=, scaling="expert", float64, arrays of other libraries; torch everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.layouts import gguf
from halfbyte.layouts.swizzle import swizzle, unswizzle
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

X = gaussian(32, 48)


@pytest.mark.parametrize("axis", [0, 1, 2, -1, -2, -3])
def test_axis(axis: int) -> None:
    x = torch.from_numpy(gaussian(16, 512).reshape(16, 32, 16))
    q = hb.quantize(x, "nvfp4", axis=axis)
    assert q == hb.quantize(x.movedim(axis, -1).contiguous(), "nvfp4") == hb.quantize(x.numpy(), "nvfp4", axis=axis)
    assert q.dequantize().movedim(-1, axis).shape == x.shape  # type: ignore[union-attr]


@pytest.mark.parametrize("axis", [3, -4, "rows"])
def test_no_such_axis(axis: Any) -> None:
    with pytest.raises(hb.InputError, match="is not an axis of shape"):
        hb.quantize(X, "nvfp4", axis=axis)


@pytest.mark.parametrize("backend", ["auto", "cpu", "reference"])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("contract", ["transformer_engine", "modelopt", "compressed_tensors", "torchao", "fouroversix"])
@pytest.mark.parametrize("method", [None, "optimal"])
def test_experts(backend: str, kind: str, contract: str, method: str | None) -> None:
    x: Any = gaussian(12, 32).reshape(3, 4, 32) * np.array([[[1]], [[10]], [[0.1]]], np.float32)
    x = torch.from_numpy(x) if kind == "torch" else x
    options: dict[str, Any] = {"contract": contract, "method": method, "backend": backend}
    q = hb.quantize(x, "nvfp4", scaling="expert", **options)
    assert tuple(q.stored_scale.shape) == (3,)  # type: ignore[union-attr]
    values: Any = hb.dequantize(q, backend=backend)
    for index in range(3):
        alone = hb.quantize(x[index], "nvfp4", **options)
        assert q[index] == alone
        assert_same_bits(np.asarray(q.global_scale[index]), np.asarray(alone.global_scale))  # type: ignore[index]
        assert_same_bits(values[index], hb.dequantize(alone))
    out = hb.quantize(x, "nvfp4", scaling="expert", **options, out=hb.quantize(x * 0, "nvfp4", **options))
    assert out == q
    shared = hb.quantize(x, "nvfp4", scaling="expert", global_amax=[100.0] * 3, **options)
    assert shared[1] == hb.quantize(x[1], "nvfp4", global_amax=100.0, **options)


def test_experts_errors() -> None:
    with pytest.raises(hb.InputError, match=r"takes a tensor of shape \(experts, rows, columns\).*not \(32, 48\)"):
        hb.quantize(X, "nvfp4", scaling="expert")
    with pytest.raises(hb.UnsupportedError, match="mxfp4 has no global scale"):
        hb.quantize(X[None], "mxfp4", scaling="expert")
    with pytest.raises(hb.InputError, match="global_amax has 2 values, but scaling='expert' needs one, or 1"):
        hb.quantize(X[None], "nvfp4", scaling="expert", global_amax=[1.0, 2.0])


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_float64_is_rounded_once(kind: str) -> None:
    wide: Any = X.astype(np.float64) * (1 + 2.0**-30)
    wide = torch.from_numpy(wide) if kind == "torch" else wide
    narrow = wide.float() if kind == "torch" else wide.astype(np.float32)
    assert hb.quantize(wide, "nvfp4") == hb.quantize(narrow, "nvfp4")
    wide[3, 5] = 1e39
    with pytest.raises(hb.InputError, match=r"float64 of shape \(32, 48\) holds 1e\+39, which float32 cannot hold"):
        hb.quantize(wide, "nvfp4")
    wide[3, 5] = float("inf")  # what is Inf already stays what it is
    hb.quantize(wide, "nvfp4")


class Foreign:
    """An array of another library: only what the protocols ask for."""

    def __init__(self, array: Any) -> None:
        self.array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


class ByArray:
    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array

    def __array__(self, *given: Any, **options: Any) -> np.ndarray[Any, Any]:
        return self.array


@pytest.mark.parametrize("kind", [Foreign, ByArray])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_arrays_of_other_libraries(kind: Any, dtype: Any) -> None:
    array = X.astype(dtype)
    assert hb.quantize(kind(array), "mxfp4") == hb.quantize(array, "mxfp4")
    assert hb.quantize(kind(array), "nvfp4", axis=0) == hb.quantize(array, "nvfp4", axis=0)
    q = hb.quantize(array, "mxfp4")
    assert hb.error(q, kind(array)).squared == hb.error(q, array).squared


@pytest.mark.parametrize("kind", [Foreign, ByArray])
def test_bfloat16_of_other_libraries(kind: Any) -> None:
    """numpy's own reader of DLPack has no bfloat16, which mlx gives; torch's has."""
    narrow = torch.from_numpy(X).bfloat16()
    given = narrow if kind is Foreign else to_numpy(narrow)
    q = hb.quantize(kind(given), "nvfp4")
    assert isinstance(q.codes, np.ndarray)
    assert q == hb.quantize(narrow, "nvfp4")


@pytest.mark.parametrize("of", [Foreign, ByArray, np.asarray, torch.from_numpy])
def test_functions_of_weights_take_what_quantize_takes(of: Any) -> None:
    wide = X.astype(np.float64)
    moments = np.eye(X.shape[1])
    assert hb.gptq(of(wide), moments, "nvfp4") == hb.gptq(X, moments, "nvfp4")
    found, wanted = hb.search_global_scale(of(wide), steps=2), hb.search_global_scale(X, steps=2)
    assert (found.global_amax, found.quantized) == (wanted.global_amax, wanted.quantized)


def test_a_cast_takes_dtypes() -> None:
    import ml_dtypes

    q = hb.quantize(X, "mxfp4")
    dtypes: tuple[Any, ...] = (torch.bfloat16, ml_dtypes.bfloat16, np.dtype(ml_dtypes.bfloat16))
    for dtype in dtypes:
        assert_same_bits(hb.cast(q, dtype)[0], hb.cast(q, "bfloat16")[0])
    half: Any = torch.float16
    with pytest.raises(hb.UnknownNameError, match=r"unknown target of a cast torch\.float16"):
        hb.cast(q, half)


def test_an_array_that_does_not_convert() -> None:
    class Broken:
        def __array__(self, *given: Any, **options: Any) -> Any:
            raise TypeError("on a card")

    with pytest.raises(hb.InputError, match=r"Broken does not become a numpy array: on a card; convert it to float32"):
        hb.quantize(Broken(), "nvfp4")  # type: ignore[arg-type]


# --- torch is first class: each public function, with torch and with numpy ---

CODES, SCALES = np.zeros((4, 32), np.uint8), np.full((4, 4), 0x38, np.uint8)
E8M0 = np.full((4, 2), 127, np.uint8)
WALK: dict[str, Any] = {
    "quantize": lambda of: hb.quantize(of(X), "nvfp4"),
    "quantize expert": lambda of: hb.quantize(of(X[None]), "nvfp4", scaling="expert"),
    "dequantize": lambda of: hb.dequantize(hb.quantize(of(X), "nvfp4")),
    "QuantizedTensor": lambda of: hb.QuantizedTensor("mxfp4", (4, 64), of(CODES), of(E8M0)),
    "cast": lambda of: hb.cast(hb.QuantizedTensor("mxfp4", (4, 64), of(CODES), of(E8M0)), "nvfp4")[0],
    "cast bf16": lambda of: hb.cast(hb.QuantizedTensor("mxfp4", (4, 64), of(CODES), of(E8M0)), "bfloat16")[0],
    "error": lambda of: hb.error(hb.quantize(of(X), "nvfp4"), of(X)).block_squared,
    "fake_quant": lambda of: hb.fake_quant(of(X), "nvfp4"),
    "hessian_from_activations": lambda of: hb.hessian_from_activations(of(X)),
    "hessian_from_activations chunks": lambda of: hb.hessian_from_activations([of(X), of(X)]),
    "Hessian": lambda of: hb.quantize(of(X), "nvfp4", method=hb.Hessian(hb.hessian_from_activations(of(X)))),
    "Optimal": lambda of: hb.quantize(of(X), "nvfp4", method=hb.Optimal(of(np.ones(48, np.float32)))),
    "gptq": lambda of: hb.gptq(of(X), of(np.eye(48, dtype=np.float32)), "nvfp4"),
    "search_global_scale": lambda of: hb.search_global_scale(of(X)).quantized,
    "swizzle": lambda of: swizzle(of(SCALES)),
    "unswizzle": lambda of: unswizzle(of(np.arange(512).astype(np.uint8)), (4, 4)),
    "gguf": lambda of: gguf.to_blocks(of(CODES), of(SCALES), hb.get_format("nvfp4")),
    "gguf back": lambda of: gguf.from_blocks(of(np.ones((2, 36), np.uint8)), hb.get_format("nvfp4"))[0],
    "half_split": lambda of: gguf.half_split(of(CODES), hb.get_format("nvfp4")),
    "even_odd": lambda of: gguf.even_odd(of(CODES), hb.get_format("nvfp4")),
    "from_gpt_oss": lambda of: hb.layouts.from_gpt_oss(of(CODES.reshape(4, 2, 16)), of(E8M0)),
    "from_modelopt": lambda of: hb.layouts.from_modelopt(of(CODES), of(SCALES), of(np.array([2.0], np.float32))),
    "from_compressed_tensors": lambda of: hb.layouts.from_compressed_tensors(of(CODES), of(SCALES), 0.5),
    "from_deepseek_v4": lambda of: hb.layouts.from_deepseek_v4(of(CODES.view(np.int8)), of(E8M0)),
    "global_amax": lambda of: hb.quantize(of(X), "nvfp4", global_amax=of(np.float32(3))),
    "rows": lambda of: hb.quantize(of(X), "nvfp4")[3:5],
    "swizzled_scales": lambda of: hb.quantize(of(X), "nvfp4").swizzled_scales(),
}


@pytest.mark.parametrize("name", WALK)
def test_torch_gives_torch_with_the_bits_of_numpy(name: str) -> None:
    got, wanted = WALK[name](torch.as_tensor), WALK[name](np.asarray)
    if isinstance(got, hb.QuantizedTensor):
        assert got == wanted
        assert got.to("cpu").device == got.device == torch.device("cpu")
        for part in (got.codes, got.scales, got.stored_scale, got.global_scale):
            assert part is None or isinstance(part, torch.Tensor)
    else:
        assert isinstance(got, torch.Tensor)
        assert isinstance(wanted, np.ndarray)
        if name != "error":  # sums in another order
            assert_same_bits(got, wanted)


def test_the_walk_names_every_public_function() -> None:
    functions = {name for name in hb.__all__ if callable(getattr(hb, name)) and name[0].islower()}
    assert functions - {"get_format", "load"} <= set(WALK)


# --- what the package shows ---


def test_modules_are_found_by_attribute() -> None:
    for name in ("online", "layouts", "checkpoint", "verify", "gpu", "testing", "contracts"):
        assert getattr(hb, name).__name__ == f"halfbyte.{name}"
    assert hb.layouts.gguf is gguf
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        hb.layouts.nothing  # noqa: B018
