"""The arrays of a quantized tensor as they are kept: bytes and float32. Typed views (float4, float8) become bytes."""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np

from halfbyte.arrays import Array, is_torch, like, to_numpy
from halfbyte.codec.pack import pack, packed_width
from halfbyte.errors import InputError
from halfbyte.formats import BlockFormat

VIEWS = {
    "e2m1": ("float4_e2m1fn_x2", "float4_e2m1fn"),
    "e4m3": ("float8_e4m3fn",),
    "e8m0": ("float8_e8m0fnu",),
}
"""Names of the dtypes, in torch or ml_dtypes, whose bytes are codes of an element or a scale."""


def dtype_of(array: Array) -> str:
    """The name of a dtype, the same in numpy and torch."""
    given = array.dtype
    return given.name if isinstance(given, np.dtype) else str(given).removeprefix("torch.")


def as_shape(given: Any) -> tuple[int, ...]:
    """A logical shape as a tuple of ints."""
    try:
        shape: tuple[int, ...] = tuple(given)
        if not all(type(length) is int for length in shape):
            shape = tuple(operator.index(length) for length in shape)
    except TypeError:
        raise InputError(f"shape must be a tuple of whole numbers, such as (256, 512), not {given!r}") from None
    if not shape:
        raise InputError("a QuantizedTensor has at least one axis, the one that is cut into blocks; its shape is ()")
    if any(length < 0 for length in shape):
        raise InputError(f"shape {shape} has a negative length")
    return shape


def as_codes(codes: Any, shape: tuple[int, ...], format: BlockFormat) -> Array:
    """Packed codes as uint8, no copy. ml_dtypes' float4 has one element per byte, so it is packed into a copy."""
    found = _as_bytes("codes", codes, format.element.name)
    if not is_torch(codes) and codes.dtype.name == "float4_e2m1fn":
        if tuple(codes.shape) != shape:
            raise InputError(f"codes of dtype float4_e2m1fn have the tensor's shape {shape}, not {tuple(codes.shape)}")
        found = pack((np.asarray(found) & 0xF).astype(np.uint8), format)
    wanted = (*shape[:-1], packed_width(shape[-1], format))
    return _of_shape("codes", found, shape, wanted, format)


def as_scales(scales: Any, shape: tuple[int, ...], format: BlockFormat) -> Array:
    """Scale codes as uint8, no copy."""
    found = _as_bytes("scales", scales, format.scale.name)
    return _of_shape("scales", found, shape, (*shape[:-1], -(-shape[-1] // format.block)), format)


def as_float32(part: str, value: Any, shape: tuple[int, ...], codes: Array) -> Array | None:
    """A tensor-level number: one for the tensor, one per index of the first axis, or one per row.

    A Python number is rounded once to float32. Arrays must be float32 already; they become arrays of the kind of
    `codes`, numpy or torch. Numbers per row may come in any shape of as many, such as (rows, 1).
    """
    if value is None:
        return None
    if isinstance(value, float | int):
        return like(_rounded(part, value), codes)
    if not hasattr(value, "dtype"):
        raise InputError(f"{part} must be a number or a float32 array, not {type(value).__name__}")
    if dtype_of(value) != "float32":
        raise InputError(f"{part} must be float32, not {dtype_of(value)}; convert it first")
    found: Array = value
    given, leading = tuple(found.shape), shape[:-1]
    if math.prod(given) not in (1, math.prod(leading)) and given != leading[:1]:
        raise InputError(
            f"{part} has shape {given}, but a tensor of shape {shape} has one number, {leading[:1]} (one per index of "
            f"the first axis) or {leading} (one per row)"
        )
    if given not in ((), leading, leading[:1]) and math.prod(given) == math.prod(leading):
        found = found.reshape(leading)
    return found if is_torch(found) == is_torch(codes) else like(np.asarray(to_numpy(found)), codes)


def _rounded(part: str, value: float) -> np.ndarray[Any, Any]:
    """A number as float32. Raises if it is finite and float32 has no such number."""
    try:
        with np.errstate(over="ignore"):
            rounded = np.asarray(value, np.float32)
        if np.isfinite(rounded) or not math.isfinite(value):
            return rounded
    except OverflowError:
        pass
    raise InputError(f"{part} does not fit into float32: its largest number is 3.4e38")


def per_row(stored: Array, shape: tuple[int, ...]) -> Array:
    """The tensor-level number, flat: one, or one per row. One per index of the first axis is repeated on its rows."""
    count, rows = math.prod(stored.shape), math.prod(shape[:-1])
    if count in (1, rows):
        return stored.reshape(-1)
    each = rows // count
    if is_torch(stored):
        return stored.reshape(-1).repeat_interleave(each)
    return np.repeat(to_numpy(stored).reshape(-1), each)


def _as_bytes(part: str, array: Any, element: str) -> Array:
    if not (is_torch(array) or isinstance(array, np.ndarray)):
        raise InputError(f"{part} must be a numpy array or a torch tensor, not {type(array).__name__}")
    name = dtype_of(array)
    if name == "uint8":
        return array
    if name not in VIEWS.get(element, ()):
        views = " or ".join(("uint8", *VIEWS.get(element, ())))
        raise InputError(f"{part} must be {views}, not {name}")
    if isinstance(array, np.ndarray):
        return array.view(np.uint8)
    import torch

    return array.view(torch.uint8)


def _of_shape(part: str, array: Array, shape: tuple[int, ...], wanted: tuple[int, ...], format: BlockFormat) -> Array:
    if tuple(array.shape) != wanted:
        given = tuple(array.shape)
        raise InputError(f"{format.name} of shape {shape} needs {part} of shape {wanted}, got {given}")
    return array
