"""quantize() and dequantize() of ordinary arrays on the CPU: allocate, and call the library once.

Ordinary means: contiguous, whole blocks, small enough for one thread, and a request that the library computes as a
whole. All else gives None, and quantize.py takes the long way, which gives the same bits.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.arrays import Array, is_torch
from halfbyte.backends import WholeCall, WholeDecode
from halfbyte.codec.bits import BFLOAT16
from halfbyte.request import Request
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch


def quantize_at_once(
    x: Array, request: Request, whole: WholeCall, amax: float, out: QuantizedTensor | None
) -> QuantizedTensor | None:
    """Quantize an array; None if the library does not serve it.

    amax: the one to use, or −1 for the tensor's own. out: checked arrays for codes and scales, or None for new ones.
    """
    shape = tuple(x.shape)
    if not shape or 0 in shape or shape[-1] % whole.block:
        return None
    width, leading = shape[-1], shape[:-1]
    codes_shape, scales_shape = (*leading, width // whole.codes_per_byte), (*leading, width // whole.block)
    multiplier: Any = None
    stored: Any = None
    if type(x) is np.ndarray:
        if not (x.flags.c_contiguous and x.flags.aligned):
            return None
        if not whole.serves(x.nbytes):
            return None
        codes: Any = np.empty(codes_shape, np.uint8) if out is None else out.codes
        scales: Any = np.empty(scales_shape, np.uint8) if out is None else out.scales
        if whole.has_numbers:
            multiplier = np.empty((), np.float32)
            stored = multiplier if whole.one_number else np.empty((), np.float32)
        rows, at = x.size // width, _address_of
    elif is_torch(x) and _is_plain(x):
        size, itemsize = x.numel(), x.element_size()
        if x.data_ptr() % itemsize or not whole.serves(size * itemsize):
            return None
        torch = sys.modules["torch"]
        codes = x.new_empty(codes_shape, dtype=torch.uint8) if out is None else out.codes
        scales = x.new_empty(scales_shape, dtype=torch.uint8) if out is None else out.scales
        if whole.has_numbers:
            multiplier = x.new_empty((), dtype=torch.float32)
            stored = multiplier if whole.one_number else x.new_empty((), dtype=torch.float32)
        rows, at = size // width, torch.Tensor.data_ptr
    else:
        return None
    numbers = (at(stored), at(multiplier)) if whole.has_numbers else (None, None)
    if not whole(at(x), rows, width, amax, at(codes), at(scales), *numbers):
        return None
    return QuantizedTensor.trusted(
        request.format, shape, codes, scales, multiplier, stored if whole.stores else None, request.contract,
        request.method,
    )  # fmt: skip


def dequantize_at_once(q: QuantizedTensor, whole: WholeDecode, dtype: np.dtype[np.generic]) -> Array | None:
    """Decode a tensor; None if the library does not serve it."""
    shape, codes, scales, stored = q.shape, q.codes, q.scales, q.stored_scale
    size = math.prod(shape)
    if shape[-1] % whole.block or size == 0 or not whole.serves(size * whole.itemsize):
        return None
    out: Array
    if type(codes) is np.ndarray and type(scales) is np.ndarray and (stored is None or type(stored) is np.ndarray):
        if not (codes.flags.c_contiguous and scales.flags.c_contiguous) or (stored is not None and stored.size != 1):
            return None
        out, at = np.empty(shape, dtype), _address_of
    elif is_torch(codes) and _is_plain(codes) and is_torch(scales) and _is_plain(scales):
        if stored is not None and not (is_torch(stored) and stored.numel() == 1 and _is_plain(stored)):
            return None
        torch = sys.modules["torch"]
        name = "bfloat16" if dtype == BFLOAT16 else dtype.name
        out, at = codes.new_empty(shape, dtype=getattr(torch, name)), torch.Tensor.data_ptr
    else:
        return None
    done = whole(at(codes), at(scales), size // whole.block, None if stored is None else at(stored), at(out))
    return out if done else None


def _address_of(array: Any) -> int:
    return int(array.ctypes.data)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is what its address says: no subclass, contiguous on the CPU, not to be negated on reading."""
    kind = type(x)
    torch = sys.modules["torch"]
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return False
    return x.is_cpu and x.is_contiguous() and not x.is_neg()
