"""hb.fake_quant: the values of a round trip, a straight-through gradient, eager and compiled."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
import halfbyte.torch_ops
from halfbyte.testing import assert_same_bits
from tests.samples import gaussian

CALLS: list[dict[str, Any]] = [
    {"format": "nvfp4"},
    {"format": "nvfp4", "contract": "modelopt", "method": "four_six:mse:256"},
    {"format": "nvfp4", "scaling": "row"},
    {"format": "nvfp4", "global_amax": 7.0, "backend": "reference"},
    {"format": "mxfp4", "method": "optimal"},
    {"format": "mxfp8", "axis": 0},
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", CALLS, ids=str)
def test_values_and_gradient(options: dict[str, Any], dtype: torch.dtype) -> None:
    x = torch.from_numpy(gaussian(64, 32)).to(dtype).requires_grad_()
    y: Any = hb.fake_quant(x, **options)
    axis = options.get("axis", -1)
    wanted: Any = hb.dequantize(hb.quantize(x, **options), dtype)
    assert_same_bits(y.contiguous(), wanted.movedim(-1, axis).contiguous())
    weights = torch.arange(x.numel()).reshape(x.shape).to(dtype)
    (y * weights).sum().backward()
    assert_same_bits(x.grad, weights)  # type: ignore[arg-type]
    array: Any = hb.fake_quant(x.detach().float().numpy(), **options)
    assert isinstance(array, np.ndarray)
    assert array.shape == x.shape


@pytest.mark.parametrize("options", CALLS, ids=str)
def test_compiled_without_a_graph_break(options: dict[str, Any]) -> None:
    torch._dynamo.reset()

    def step(x: torch.Tensor) -> torch.Tensor:
        y: Any = hb.fake_quant(x * 2, **options)
        total: torch.Tensor = (y * y).sum()
        return total

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    x = torch.from_numpy(gaussian(64, 32)).requires_grad_()
    same = x.detach().clone().requires_grad_()
    got: Any = compiled(x)
    wanted: Any = step(same)
    assert_same_bits(got.detach(), wanted.detach())
    got.backward()
    wanted.backward()
    assert_same_bits(x.grad, same.grad)  # type: ignore[arg-type]


def test_the_operator() -> None:
    x = torch.from_numpy(gaussian(8, 32)).requires_grad_()
    y = torch.ops.halfbyte.fake_quant(x, "nvfp4", "modelopt", "four_six:mse:256")
    assert_same_bits(y.detach(), hb.fake_quant(x.detach(), "nvfp4", "modelopt", "four_six:mse:256"))
    y.sum().backward()
    assert_same_bits(x.grad, torch.ones(8, 32))  # type: ignore[arg-type]
    torch.library.opcheck(halfbyte.torch_ops.fake_quant, (x, "nvfp4", "modelopt", "sweep:fused"))


def test_errors() -> None:
    x = torch.ones(32, 32)
    with pytest.raises(hb.UnsupportedError, match="transforms the tensor"):
        hb.fake_quant(x, "nvfp4", hb.contracts.transformer_engine(columnwise=True))
    with pytest.raises(hb.UnsupportedError, match="fake_quant has no out"):
        hb.fake_quant(x, "nvfp4", out=hb.quantize(x, "nvfp4"))
    with pytest.raises(TypeError, match="colour"):
        hb.fake_quant(x, "nvfp4", colour=1)


@pytest.mark.parametrize("options", [{}, {"axis": 0}, {"method": "optimal", "contract": "modelopt"}])
def test_float64_stays_float64(options: dict[str, Any]) -> None:
    """Also under torch.compile, where a value cannot be looked at."""
    x = torch.randn(64, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wanted: Any = hb.fake_quant(x.float(), "nvfp4", **options)
    leaf = x.clone().requires_grad_()
    got: Any = hb.fake_quant(leaf, "nvfp4", **options)
    got.sum().backward()
    assert leaf.grad is not None
    assert (leaf.grad.dtype, bool((leaf.grad == 1).all())) == (torch.float64, True)
    compiled = torch.compile(lambda a: hb.fake_quant(a, "nvfp4", **options), backend="eager", fullgraph=True)
    in_numpy: Any = hb.fake_quant(x.numpy(), "nvfp4", **options)
    results: tuple[Any, ...] = (got.detach(), compiled(x), torch.from_numpy(in_numpy))
    for values in results:
        assert values.dtype == torch.float64
        assert_same_bits(values.float(), wanted)
    with pytest.raises(hb.InputError, match="which float32 cannot hold"):
        hb.fake_quant(x * 1e60, "nvfp4")


@pytest.mark.parametrize("amax", [None, 7.0, [3.0, 7.0]], ids=str)
def test_experts_compiled_without_a_graph_break(amax: Any) -> None:
    torch._dynamo.reset()
    x = torch.from_numpy(gaussian(64, 32)).reshape(2, 32, 32)
    options: dict[str, Any] = {"method": "optimal", "scaling": "expert", "global_amax": amax}
    compiled = torch.compile(lambda a: hb.fake_quant(a, "nvfp4", **options), backend="aot_eager", fullgraph=True)
    leaf = x.clone().requires_grad_()
    values: Any = compiled(leaf)
    assert_same_bits(values.detach(), hb.fake_quant(x, "nvfp4", **options))
    values.sum().backward()
    assert bool((leaf.grad == 1).all())  # type: ignore[union-attr]
