"""quantize and dequantize as operators of PyTorch, so that torch.compile can trace through them. Imports torch.

import halfbyte.torch_ops
codes, scales, multiplier, stored = torch.ops.halfbyte.quantize(x, "nvfp4", "transformer_engine", "four_six:mse:256")
y = torch.ops.halfbyte.fake_quant(x, "nvfp4", "transformer_engine", "optimal")

Methods are spelled as everywhere (methods/spelling.py).
"""

from __future__ import annotations

from typing import Any

import torch

from halfbyte import tracing
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule, get_contract
from halfbyte.errors import UnsupportedError
from halfbyte.formats import get_format
from halfbyte.quantize import dequantize as dequantize_tensor
from halfbyte.quantize import quantize as quantize_tensor
from halfbyte.request import check_shape, resolve
from halfbyte.types import QuantizedTensor

Four = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _parts(q: QuantizedTensor) -> Four:
    """What an operator returns: codes, scales, multiplier and stored scale; what a contract does not have is empty.

    The outputs of an operator must not share memory, and torch.compile expects them at the start of their own. The
    tensor-level numbers of a card lie behind each other in one tensor, so they are copied.
    """
    codes, scales, multiplier, stored = q.codes, q.scales, q.global_scale, q.stored_scale
    if not (isinstance(codes, torch.Tensor) and isinstance(scales, torch.Tensor)):
        raise TypeError("tensors give tensors")
    none = codes.new_empty(0, dtype=torch.float32)
    copies = [number.clone() if isinstance(number, torch.Tensor) else none.clone() for number in (multiplier, stored)]
    return codes, scales, copies[0], copies[1]


@torch.library.custom_op("halfbyte::quantize", mutates_args=())
def quantize(
    x: torch.Tensor, format: str, contract: str, method: str = "amax", global_amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, multiplier and stored scale. If the contract has no multiplier or stored scale, it is empty."""
    q = quantize_tensor(x, format, contract, method, global_amax=global_amax)
    return _parts(q)


@quantize.register_fake
def _(
    x: torch.Tensor, format: str, contract: str, method: str = "amax", global_amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    block_format = get_format(format)
    rule = get_contract(contract, block_format).rule(block_format)
    width = x.shape[-1]
    codes = x.new_empty((*x.shape[:-1], ceil_div(width, block_format.codes_per_byte)), dtype=torch.uint8)
    scales = x.new_empty((*x.shape[:-1], ceil_div(width, block_format.block)), dtype=torch.uint8)
    levels = isinstance(rule, NVFP4Rule)
    multiplier = x.new_empty(() if levels else (0,), dtype=torch.float32)
    stored = x.new_empty(() if isinstance(rule, NVFP4Rule) and rule.stored is not None else (0,), dtype=torch.float32)
    return codes, scales, multiplier, stored


@torch.library.custom_op("halfbyte::dequantize", mutates_args=())
def dequantize(
    codes: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor, width: int, format: str, contract: str,
    dtype: torch.dtype, method: str = "amax",
) -> torch.Tensor:  # fmt: skip
    """Decoded values of that dtype. `stored` is the stored scale that quantize returned, which may be empty."""
    request = resolve(format, contract, method)
    kept = stored.reshape(()) if stored.numel() == 1 else stored if stored.numel() else None
    shape = (*codes.shape[:-1], width)
    q = QuantizedTensor(request.format, shape, codes, scales, None, kept, request.contract, request.method)
    values = dequantize_tensor(q, dtype)
    if not isinstance(values, torch.Tensor):
        raise TypeError("tensors decode to tensors")
    return values


@dequantize.register_fake
def _(
    codes: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor, width: int, format: str, contract: str,
    dtype: torch.dtype, method: str = "amax",
) -> torch.Tensor:  # fmt: skip
    return codes.new_empty((*codes.shape[:-1], width), dtype=dtype)


# --- what torch.compile makes of hb.quantize and hb.dequantize (tracing.py) ---


@torch.library.custom_op("halfbyte::quantize_traced", mutates_args=())
def quantize_traced(
    x: torch.Tensor, call: str, global_amax: torch.Tensor | None, number: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same by the name of a traced call. What the contract does not have is empty."""
    traced = tracing.CALLS[call]
    request = traced.request
    q = quantize_tensor(
        x, request.format, request.contract, request.method, tile=request.tile, scaling=request.scaling,
        global_amax=number if global_amax is None else global_amax, backend=traced.backend, threads=request.threads,
    )  # fmt: skip
    return _parts(q)


@quantize_traced.register_fake
def _(
    x: torch.Tensor, call: str, global_amax: torch.Tensor | None, number: float | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    traced = tracing.CALLS[call]
    request, format = traced.request, traced.request.format
    *leading, width = check_shape(request, tuple(x.shape))
    numbers = leading if request.scaling == "row" else []
    return (
        x.new_empty((*leading, ceil_div(width, format.codes_per_byte)), dtype=torch.uint8),
        x.new_empty((*leading, ceil_div(width, format.block)), dtype=torch.uint8),
        x.new_empty(numbers if traced.has_multiplier else (0,), dtype=torch.float32),
        x.new_empty(numbers if traced.has_stored else (0,), dtype=torch.float32),
    )


@torch.library.custom_op("halfbyte::dequantize_traced", mutates_args=())
def dequantize_traced(
    codes: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor | None, shape: list[int], call: str
) -> torch.Tensor:
    """Decoded values, by the name of a traced call."""
    traced = tracing.CALLS[call]
    request = traced.request
    q = QuantizedTensor(request.format, tuple(shape), codes, scales, None, stored, request.contract, request.method)
    values = dequantize_tensor(q, traced.dtype, traced.backend, request.threads)
    if not isinstance(values, torch.Tensor):
        raise TypeError("tensors decode to tensors")
    return values


@dequantize_traced.register_fake
def _(
    codes: torch.Tensor, scales: torch.Tensor, stored: torch.Tensor | None, shape: list[int], call: str
) -> torch.Tensor:
    names = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    return codes.new_empty(shape, dtype=names[tracing.CALLS[call].dtype])


# --- fake quantization ---


def _straight(function: Any, others: int) -> None:
    """Let the gradient of the first argument be the gradient of the result."""

    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (gradient, *(None,) * others)

    function.register_autograd(backward)


@torch.library.custom_op("halfbyte::fake_quant", mutates_args=())
def fake_quant(x: torch.Tensor, format: str, contract: str, method: str = "amax") -> torch.Tensor:
    """The values that x has after quantization, in its dtype; the gradient passes straight through."""
    return _decoded(quantize_tensor(x, format, contract, method), x)


@fake_quant.register_fake
def _(x: torch.Tensor, format: str, contract: str, method: str = "amax") -> torch.Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("halfbyte::fake_quant_traced", mutates_args=())
def fake_quant_traced(
    x: torch.Tensor, call: str, global_amax: torch.Tensor | None, number: float | None
) -> torch.Tensor:
    """The same by the name of a traced call."""
    traced = tracing.CALLS[call]
    request = traced.request
    q = quantize_tensor(
        x, request.format, request.contract, request.method, tile=request.tile, scaling=request.scaling,
        global_amax=number if global_amax is None else global_amax, backend=traced.backend, threads=request.threads,
    )  # fmt: skip
    return _decoded(q, x)


@fake_quant_traced.register_fake
def _(x: torch.Tensor, call: str, global_amax: torch.Tensor | None, number: float | None) -> torch.Tensor:
    return x.new_empty(x.shape)


_straight(fake_quant, 3)
_straight(fake_quant_traced, 3)


def _decoded(q: QuantizedTensor, x: torch.Tensor) -> torch.Tensor:
    if q.contract.transform.columnwise or q.contract.transform.hadamard:
        raise UnsupportedError(f"{q.contract} transforms the tensor, so its decoded values do not stand for x")
    values = dequantize_tensor(q, torch.float32 if x.dtype == torch.float64 else x.dtype)
    if not isinstance(values, torch.Tensor):
        raise TypeError("tensors decode to tensors")
    return values.to(x.dtype)
