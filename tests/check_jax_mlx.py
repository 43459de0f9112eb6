"""Arrays of jax and mlx, with the libraries themselves: what numpy gives for the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte.layouts.swizzle import swizzle
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

WIDE = gaussian(32, 64).astype(np.float64) * (1 + 2.0**-30)
DTYPES: dict[str, Any] = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
    "float64": np.float64,
}


def made(library: str, values: Any, dtype: str) -> Any:
    """An array of a library. They are imported here, as it takes a second."""
    if library == "jax":
        import jax

        with jax.enable_x64(True):
            return jax.numpy.asarray(np.asarray(values)).astype(dtype)
    import mlx.core as mx

    return mx.array(np.asarray(values), dtype=mx.float64).astype(getattr(mx, dtype), stream=mx.cpu)


@pytest.fixture(params=["jax", "mlx"])
def library(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_quantize_gives(library: str, dtype: str, tmp_path: Path) -> None:
    theirs, ours = made(library, WIDE, dtype), WIDE.astype(DTYPES[dtype])
    for format in ("nvfp4", "mxfp4", "mxfp8"):
        q = hb.quantize(theirs, format, method="optimal")
        assert isinstance(q.codes, np.ndarray)
        assert q == hb.quantize(ours, format, method="optimal")
    assert hb.quantize(theirs, "nvfp4", axis=0) == hb.quantize(ours, "nvfp4", axis=0)
    assert hb.quantize(theirs.T, "nvfp4") == hb.quantize(ours.T, "nvfp4"), "strides"
    assert hb.quantize(theirs[::2], "nvfp4") == hb.quantize(ours[::2], "nvfp4")
    assert hb.quantize(theirs[:0], "nvfp4") == hb.quantize(ours[:0], "nvfp4")
    stacks = theirs.reshape(2, 16, 64), ours.reshape(2, 16, 64)
    each, q = (hb.quantize(stack, "nvfp4", scaling="expert") for stack in stacks)
    assert each == q
    each.save(tmp_path / "q")
    assert hb.load(tmp_path / "q") == q
    values = hb.fake_quant(theirs, "nvfp4")
    assert values.dtype == DTYPES[dtype]
    assert_same_bits(values.astype(np.float32), hb.fake_quant(ours, "nvfp4").astype(np.float32))  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_an_error_is_measured_against(library: str, dtype: str) -> None:
    """float64 as it is, not rounded: it may hold what float32 does not."""
    theirs, ours = made(library, WIDE, dtype), WIDE.astype(DTYPES[dtype])
    q = hb.quantize(ours, "nvfp4")
    for kind in (q, q.to("cpu")):
        assert hb.error(kind, theirs).squared == hb.error(kind, ours).squared
    assert hb.error(q, made(library, WIDE * 1e60, "float64")).relative == hb.error(q, WIDE * 1e60).relative


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beside_the_tensor(library: str, dtype: str) -> None:
    theirs, ours = made(library, WIDE, dtype), WIDE.astype(DTYPES[dtype])
    x, weights = ours.astype(np.float32), np.abs(ours)[0]
    moments = (ours.T.astype(np.float64) @ ours.astype(np.float64)).astype(DTYPES[dtype])
    by_them = hb.Optimal(made(library, weights, dtype))
    assert hb.quantize(x, "nvfp4", method=by_them) == hb.quantize(x, "nvfp4", method=hb.Optimal(weights))
    amax = np.asarray(ours.max())
    assert hb.quantize(x, "nvfp4", global_amax=made(library, amax, dtype)) == hb.quantize(x, "nvfp4", global_amax=amax)
    assert_same_bits(hb.hessian_from_activations(theirs), hb.hessian_from_activations(ours))
    assert hb.gptq(theirs, made(library, moments, dtype), "nvfp4") == hb.gptq(ours, moments, "nvfp4")
    found, wanted = hb.search_global_scale(theirs, steps=1), hb.search_global_scale(ours, steps=1)
    assert (found.global_amax, found.quantized) == (wanted.global_amax, wanted.quantized)


@pytest.mark.parametrize("dtype", ["int32", "uint8", "complex64"])
def test_what_is_refused(library: str, dtype: str) -> None:
    theirs = made(library, np.ones((4, 32)), dtype)
    for act in (hb.quantize, hb.fake_quant):
        with pytest.raises(hb.InputError, match=f"cannot quantize dtype {dtype}"):
            act(theirs, "nvfp4")
    with pytest.raises(hb.InputError, match=r"float64 of shape .* holds 1e\+60, which float32 cannot hold"):
        hb.quantize(made(library, np.full((4, 32), 1e60), "float64"), "nvfp4")
    with pytest.raises(hb.InputError, match="codes must be a numpy array or a torch tensor, not"):
        hb.QuantizedTensor("mxfp4", (4, 32), theirs, theirs)
    with pytest.raises(hb.InputError, match="scales must be a numpy array or a torch tensor, not"):
        swizzle(theirs)


@pytest.mark.parametrize("transform", ["jit", "grad"])
def test_what_jax_traces_holds_no_numbers(transform: str) -> None:
    import jax

    def loss(x: Any) -> Any:
        return jax.numpy.sum(hb.fake_quant(x, "nvfp4"))

    with pytest.raises(hb.InputError, match=r"Tracer does not become a numpy array: .*outside of functions that it"):
        getattr(jax, transform)(loss)(jax.numpy.ones((4, 32)))


def test_what_jax_has_freed() -> None:
    x = made("jax", WIDE, "float32")
    x.delete()
    with pytest.raises(hb.InputError, match=r"does not become a numpy array: .*deleted"):
        hb.quantize(x, "nvfp4")
