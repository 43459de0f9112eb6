"""quantize and dequantize as operators of PyTorch, so that torch.compile can trace through them. Imports torch.

import halfbyte.torch_ops
codes, scales, multiplier, stored = torch.ops.halfbyte.quantize(x, "nvfp4", "transformer_engine", "amax")
"""

from __future__ import annotations

import torch

from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule, get_contract
from halfbyte.errors import InputError
from halfbyte.formats import get_format
from halfbyte.methods import Amax, FourSix, Method, Optimal
from halfbyte.quantize import dequantize as dequantize_tensor
from halfbyte.quantize import quantize as quantize_tensor
from halfbyte.types import QuantizedTensor

METHODS: dict[str, Method] = {
    "amax": Amax(),
    "optimal": Optimal(),
    **{
        f"four_six_{error}_{top}{'_fast' * fast}": FourSix(error, top, fast)
        for error in ("mae", "mse")
        for top in (448, 256)
        for fast in (False, True)
    },
}
"""The methods by their names in the operators."""


@torch.library.custom_op("halfbyte::quantize", mutates_args=())
def quantize(
    x: torch.Tensor, format: str, contract: str, method: str = "amax", global_amax: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales, multiplier and stored scale. If the contract has no multiplier or stored scale, it is empty."""
    q = quantize_tensor(x, format, contract, _method(method), global_amax=global_amax)
    none = torch.empty(0, dtype=torch.float32, device=x.device)
    parts = (q.codes, q.scales, q.global_scale, q.stored_scale)
    codes, scales, multiplier, stored = (part if isinstance(part, torch.Tensor) else none.clone() for part in parts)
    return codes, scales, multiplier, stored


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
    block_format = get_format(format)
    chosen = get_contract(contract, block_format)
    kept = stored.reshape(()) if stored.numel() == 1 else stored if stored.numel() else None
    q = QuantizedTensor(block_format, (*codes.shape[:-1], width), codes, scales, None, kept, chosen, _method(method))
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


def _method(name: str) -> Method:
    if name not in METHODS:
        raise InputError(f"unknown method {name!r} of the operator; known: {', '.join(METHODS)}")
    return METHODS[name]
