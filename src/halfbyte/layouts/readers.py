"""Quantized tensors from the tensors of a checkpoint layout: one function per layout. Nothing is computed.

Shapes and suffixes come from the layouts' tables. Arrays are numpy or torch, on any device, as bytes or as float8 and
float4 views; what is transposed in a file is turned by a view or a copy on its device.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.arrays import Array, is_torch
from halfbyte.errors import InputError
from halfbyte.formats import get_format
from halfbyte.layouts import compressed_tensors, deepseek_v4, gpt_oss, modelopt
from halfbyte.layouts.description import PartRule, Storage, is_transposed
from halfbyte.tensor_parts import dtype_of
from halfbyte.types import QuantizedTensor


def from_gpt_oss(blocks: Array, scales: Array) -> QuantizedTensor:
    """gpt-oss' experts: MXFP4 of shape (..., rows, columns), without a copy where memory is contiguous.

    blocks: `*_blocks`, uint8 (..., rows, columns/32, 16). scales: `*_scales`, uint8 (..., rows, columns/32).

    >>> import torch
    >>> blocks, scales = torch.zeros(2, 4, 3, 16, dtype=torch.uint8), torch.zeros(2, 4, 3, dtype=torch.uint8)
    >>> from_gpt_oss(blocks, scales).shape
    (2, 4, 96)
    """
    table = gpt_oss.STACK
    packed, bytes_of = _bytes(table.codes, blocks), table.block // table.packing
    if len(packed.shape) < 3 or packed.shape[-1] != bytes_of:
        raise InputError(f"blocks have shape {tuple(packed.shape)}; gpt-oss stores (..., rows, columns/32, {bytes_of})")
    *leading, count, _ = packed.shape
    shape = (*leading, count * table.block)
    return QuantizedTensor(
        table.format, shape, packed.reshape(*leading, -1), _bytes(table.rules["scales"], scales), contract="ocp"
    )


def from_modelopt(weight: Array, weight_scale: Array, weight_scale_2: Array | float) -> QuantizedTensor:
    """Model-Optimizer's NVFP4: weight, weight_scale, and weight_scale_2, which multiplies.

    weight: uint8 (rows, columns/2); a stack of experts has (experts, columns/2, rows), each matrix transposed.
    weight_scale: E4M3 (rows, columns/16); of a stack (experts, columns/16, rows).
    weight_scale_2: float32, one number; of a stack one, or (experts,).

    >>> import torch
    >>> q = from_modelopt(torch.zeros(4, 16, dtype=torch.uint8), torch.ones(4, 2).to(torch.float8_e4m3fn), 0.5)
    >>> q.shape, q.global_scale
    ((4, 32), tensor(0.5000))
    """
    table = modelopt.STACK if len(getattr(weight, "shape", ())) == 3 else modelopt.MATRIX
    return _read(table, weight, weight_scale, weight_scale_2, "modelopt")


def from_compressed_tensors(
    weight_packed: Array, weight_scale: Array, weight_global_scale: Array | float | None = None
) -> QuantizedTensor:
    """compressed-tensors' NVFP4 (with weight_global_scale, which divides) or MXFP4 (without).

    weight_packed: uint8 (rows, columns/2). weight_scale: E4M3 (rows, columns/16), or for MXFP4 uint8 (rows,
    columns/32). weight_global_scale: float32, shape (1,) or ().

    >>> import torch
    >>> packed = torch.zeros(4, 16, dtype=torch.uint8)
    >>> from_compressed_tensors(packed, torch.ones(4, 2).to(torch.float8_e4m3fn), torch.tensor([8.0])).global_scale
    tensor(0.1250)
    """
    if weight_global_scale is None:
        return _read(compressed_tensors.MXFP4, weight_packed, weight_scale, None, "ocp")
    return _read(compressed_tensors.NVFP4, weight_packed, weight_scale, weight_global_scale, "compressed_tensors")


def from_deepseek_v4(weight: Array, scale: Array) -> QuantizedTensor:
    """DeepSeek-V4's routed experts: MXFP4 from weight, int8 or uint8 (rows, columns/2), and scale, E8M0.

    scale: uint8 or float8_e8m0fnu (rows, columns/32).
    """
    return _read(deepseek_v4.MXFP4, weight, scale, None, "ocp")


def _read(table: Storage, codes: Any, scales: Any, stored: Any, contract: str) -> QuantizedTensor:
    """A tensor by a layout's table."""
    parts = [_bytes(table.codes, codes), _bytes(table.rules["scales"], scales)]
    if len(codes.shape) != (3 if table.stacked else 2):
        raise InputError(
            f"{table.name}: codes have shape {tuple(codes.shape)}, but {table.layout} stores "
            f"{table.describe(table.codes)}"
        )
    if is_transposed(table.codes):
        parts = [part.mT for part in parts]
        parts = [part.contiguous() if is_torch(part) else np.ascontiguousarray(part) for part in parts]
    shape = (*tuple(parts[0].shape[:-1]), parts[0].shape[-1] * table.packing)
    if stored is not None and hasattr(stored, "shape") and tuple(stored.shape) == (1,):
        stored = stored.reshape(())
    if not hasattr(stored, "shape"):
        stored = None if stored is None else float(stored)
    format = get_format(table.format, table.block)
    return QuantizedTensor(format, shape, parts[0], parts[1], None, stored, contract)


def _bytes(rule: PartRule, array: Any) -> Any:
    """int8 bytes as uint8. All other dtypes are for QuantizedTensor to judge."""
    if not (is_torch(array) or isinstance(array, np.ndarray)):
        raise InputError(f"{rule.role} must be a numpy array or a torch tensor, not {type(array).__name__}")
    if dtype_of(array) != "int8" or "I8" not in rule.dtypes:
        return array
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    import torch

    return array.view(torch.uint8)
