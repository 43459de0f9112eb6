"""Operands other than float tensors of torch and numpy: float64, and arrays of other libraries."""

from __future__ import annotations

import contextlib
import importlib.util
from numbers import Integral
from typing import Any

import numpy as np

from halfbyte.arrays import Array, is_torch, to_numpy
from halfbyte.errors import HalfbyteError, InputError

NOT_READABLE = (TypeError, ValueError, BufferError, RuntimeError, AttributeError)
"""What other libraries raise for an array that does not hold numbers which numpy can read."""


class NeedsConversion(HalfbyteError):
    """Inside halfbyte: the operand has to go through `to_operand` first."""


def needs_conversion(x: object) -> bool:
    """Whether x is float64 or an array of another library."""
    if is_torch(x):
        return str(x.dtype) == "torch.float64"
    if isinstance(x, np.ndarray):
        return bool(x.dtype == np.float64)
    return not isinstance(x, np.generic) and (hasattr(x, "__dlpack__") or hasattr(x, "__array__"))


def to_operand(x: Any) -> Array:
    """x as an array that quantize takes: float64 rounded once to float32, other libraries' arrays as numpy or torch.

    A finite float64 that float32 cannot hold raises; on a GPU this check waits for the device.
    """
    array: Any = x if is_torch(x) or isinstance(x, np.ndarray) else imported(x)
    if is_torch(array):
        import torch

        if array.dtype != torch.float64:
            return array
        rounded: torch.Tensor = array.float()
        if bool((torch.isinf(rounded) & torch.isfinite(array)).any()):
            raise InputError(_overflow(tuple(array.shape), float(array[torch.isfinite(array)].abs().max())))
        return rounded
    if array.dtype != np.float64:
        return np.asarray(array)
    with np.errstate(over="ignore"):
        narrow: np.ndarray[Any, np.dtype[np.float32]] = array.astype(np.float32)
    if (np.isinf(narrow) & np.isfinite(array)).any():
        raise InputError(_overflow(array.shape, float(np.abs(array[np.isfinite(array)]).max())))
    return narrow


def _overflow(shape: tuple[int, ...], largest: float) -> str:
    return (
        f"float64 of shape {shape} holds {largest:.3g}, which float32 cannot hold; float64 is rounded once to float32 "
        "before it is quantized, so scale the tensor down first"
    )


def imported(x: Any) -> Array:
    """An array of another library, in its own dtype: through `__array__`, or DLPack where that is missing or fails."""
    try:
        if hasattr(x, "__dlpack_device__") and int(x.__dlpack_device__()[0]) == 2:  # CUDA
            import torch

            tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(x)
            return tensor
    except NOT_READABLE:  # what jax traces or has freed
        pass
    try:
        made = _from_array(x) if hasattr(x, "__array__") else _from_dlpack(x)
    except NOT_READABLE as error:
        reason = str(error).split("\n")[0].rstrip(".")
        raise InputError(
            f"a {type(x).__module__}.{type(x).__name__} does not become a numpy array: {reason}; convert it to float32 "
            "with its own library first, outside of functions that it traces"
        ) from error
    if made.dtype == object:
        raise InputError(f"expected a numpy array or a torch tensor, got {type(x).__name__}")
    return made


def _from_array(x: Any) -> Array:
    """Through `__array__`. mlx has none for bfloat16, but DLPack for all dtypes."""
    try:
        return np.asarray(x)
    except NOT_READABLE:
        if not hasattr(x, "__dlpack__"):
            raise
        with contextlib.suppress(*NOT_READABLE):
            return _from_dlpack(x)
        raise


def _from_dlpack(x: Any) -> Array:
    """Through DLPack on the host. numpy's own reader knows no bfloat16; torch's does, if torch is there."""
    try:
        return np.from_dlpack(x)
    except (TypeError, BufferError, RuntimeError):
        if importlib.util.find_spec("torch") is None:
            raise
        from torch.utils.dlpack import from_dlpack

        return to_numpy(from_dlpack(x))


def move_axis(x: Any, axis: int) -> Array:
    """x with one axis moved to the end: a view."""
    array: Any = x
    if not (is_torch(x) or isinstance(x, np.ndarray)):
        if not needs_conversion(x):
            raise InputError(f"expected a numpy array or a torch tensor, got {type(x).__name__}")
        array = imported(x)
    rank = len(array.shape)
    if isinstance(axis, bool) or not isinstance(axis, Integral) or not -rank <= axis < rank:
        raise InputError(f"axis {axis!r} is not an axis of shape {tuple(array.shape)}")
    moved: Array = array.movedim(axis, -1) if is_torch(array) else np.moveaxis(array, axis, -1)
    return moved
