"""fake_quant(): quantize and decode at once, with a straight-through gradient."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from halfbyte import tracing
from halfbyte.arrays import Array, is_torch
from halfbyte.contracts import Contract
from halfbyte.errors import UnsupportedError
from halfbyte.experts import amax_of_each, check_experts
from halfbyte.foreign_arrays import needs_conversion, to_operand
from halfbyte.formats import BlockFormat
from halfbyte.methods import Method
from halfbyte.quantize import dequantize, quantize

if TYPE_CHECKING:
    import torch


def fake_quant(
    x: Array,
    format: str | BlockFormat,
    contract: str | Contract | None = None,
    method: str | Method | None = None,
    **options: Any,
) -> Array:
    """The values that x has after quantization, in x's dtype, shape and device; the gradient passes straight through.

    The values are those of `dequantize(quantize(x, …), x.dtype)`, bit for bit; for float64 those of float32. For
    training, the gradient of x is the gradient of the result, unchanged, also where values saturate. It works under
    torch.compile without a graph break; `torch.ops.halfbyte.fake_quant(x, format, contract, method)` is the same as an
    operator (import halfbyte.torch_ops). numpy arrays give numpy arrays. A contract that quantizes the transpose is
    refused.

    x: as in `quantize`. format, contract, method, and the options block, tile, scaling, global_amax, backend, threads
    and axis: as in `quantize`. There is no gradient for global_amax.

    >>> import torch
    >>> w = torch.tensor([[0.11, -0.4] * 16], requires_grad=True)
    >>> y = fake_quant(w, "mxfp4", method="optimal")
    >>> y.sum().backward()
    >>> y[0, :2].tolist(), w.grad[0, :2].tolist()
    ([0.125, -0.375], [1.0, 1.0])
    """
    axis = options.pop("axis", -1)
    if needs_conversion(x) and not (is_torch(x) and tracing.is_tracing()):
        narrow: Any = fake_quant(to_operand(x), format, contract, method, axis=axis, **options)
        if not str(getattr(x, "dtype", "")).endswith("float64"):
            as_given: Array = narrow
            return as_given
        wide: Array = narrow.double() if is_torch(narrow) else narrow.astype("float64")
        return wide
    if axis != -1:
        from halfbyte.foreign_arrays import move_axis

        moved = fake_quant(move_axis(x, axis), format, contract, method, **options)
        return moved.movedim(-1, axis) if is_torch(moved) else _back(moved, axis)
    if "out" in options:
        raise UnsupportedError("fake_quant has no out: it gives new values")
    if is_torch(x):
        if tracing.is_tracing():
            traced = _traced_experts if options.get("scaling") == "expert" else _traced
            return traced(x, format, contract, method, options)
        made: torch.Tensor = _function().apply(x, functools.partial(_values, format, contract, method, options))
        return made
    return _values(format, contract, method, options, x)


def _values(format: Any, contract: Any, method: Any, options: dict[str, Any], x: Array) -> Array:
    q = quantize(x, format, contract, method, **options)
    if q.contract.transform.columnwise or q.contract.transform.hadamard:
        raise UnsupportedError(f"{q.contract} transforms the tensor, so its decoded values do not stand for x")
    kept = {name: options[name] for name in ("backend", "threads") if name in options}
    return dequantize(q, x.dtype, **kept)


def _traced_experts(x: torch.Tensor, format: Any, contract: Any, method: Any, options: dict[str, Any]) -> torch.Tensor:
    """One operator per expert."""
    import torch

    check_experts(tuple(x.shape), format, options.get("block"))
    amaxes = amax_of_each(options.get("global_amax"), x.shape[0])
    each = [
        _traced(x[index], format, contract, method, options | {"scaling": "tensor", "global_amax": amax})
        for index, amax in enumerate(amaxes)
    ]
    return torch.stack(each) if each else x.clone()


def _traced(x: torch.Tensor, format: Any, contract: Any, method: Any, options: dict[str, Any]) -> torch.Tensor:
    """The operator that stands in a compiled graph. All but the tensors is looked up when the call is traced."""
    import torch

    known = ("block", "tile", "scaling", "backend", "threads")
    unknown = [name for name in options if name not in (*known, "global_amax")]
    if unknown:
        raise TypeError(f"fake_quant got an unexpected argument {unknown[0]!r}")
    block, tile, scaling, threads = (options.get(name) for name in ("block", "tile", "scaling", "threads"))
    backend = options.get("backend", "auto")
    name = tracing.quantizing(
        format, contract, method, block, tile, scaling, backend, threads, str(x.dtype), str(x.device.type)
    )
    amax = options.get("global_amax")
    tensor = amax if is_torch(amax) else None
    number = None if tensor is not None or amax is None else float(amax)
    made: torch.Tensor = torch.ops.halfbyte.fake_quant_traced(x, name, tensor, number)
    return made


@functools.cache
def _function() -> Any:
    """The function of torch.autograd: forward, any function of x; backward, the gradient as it is."""
    import torch

    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor, values: Any) -> torch.Tensor:
            made: torch.Tensor = values(x.detach())
            return made

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            return

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
            return gradients[0], None

    return StraightThrough


def _back(values: Any, axis: int) -> Array:
    import numpy as np

    moved: Array = np.moveaxis(values, -1, axis)
    return moved
