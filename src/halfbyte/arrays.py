"""Convert between numpy arrays and torch tensors. torch is imported only if the caller has a torch tensor."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import BFLOAT16, DTYPES
from halfbyte.errors import InputError, unknown_name

if TYPE_CHECKING:
    import torch

    Array: TypeAlias = npt.NDArray[Any] | torch.Tensor
else:
    Array = Any

F = TypeVar("F", bound=Callable[..., Any])

DTYPE_NAMES = {
    "float32": "fp32",
    "fp32": "fp32",
    "float16": "fp16",
    "fp16": "fp16",
    "bfloat16": "bf16",
    "bf16": "bf16",
}


def is_torch(x: object) -> TypeGuard[torch.Tensor]:
    """Whether x is a torch tensor. If torch was never imported, nothing can be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def to_numpy(x: Array) -> npt.NDArray[Any]:
    """A numpy array. It shares the memory of numpy arrays and CPU tensors; tensors on other devices are copied.

    bfloat16 tensors become arrays of ml_dtypes.bfloat16, and float8 tensors become arrays of their bytes.
    """
    if not is_torch(x):
        if not isinstance(x, np.ndarray):
            raise InputError(f"expected a numpy array or a torch tensor, got {type(x).__name__}")
        return x
    import torch

    check_dense(x)
    try:
        tensor = x.detach().cpu().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            return tensor.view(torch.int16).numpy().view(BFLOAT16)
        if tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
            return tensor.view(torch.uint8).numpy()
        return tensor.numpy()
    except (RuntimeError, TypeError) as error:
        raise InputError(
            f"a tensor of type {type(x).__name__} and dtype {x.dtype} gives no numpy array: {error}; give a plain "
            "torch.Tensor of float32, float16 or bfloat16"
        ) from error


def check_dense(x: torch.Tensor) -> None:
    """Raise if a tensor has no plain memory to read: sparse or nested ones, and those on the meta device."""
    if x.is_nested or str(x.layout) != "torch.strided":
        kind = "nested tensor" if x.is_nested else f"layout {x.layout}"
        way = "give its parts one by one" if x.is_nested else "call .to_dense() first"
        raise InputError(f"expected a dense torch tensor, got {kind}; {way}")
    if x.is_meta:
        raise InputError(
            f"a tensor of shape {tuple(x.shape)} on the meta device holds no numbers; load its values first"
        )


def is_dtype(x: object) -> bool:
    """Whether x is a dtype of torch. If torch was never imported, nothing can be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.dtype)


def device_of(name: object, what: str) -> torch.device:
    """A device by its name or index. Raises for what is none, and for a GPU that is not there."""
    import torch

    if not isinstance(name, str | int | torch.device) or isinstance(name, bool):
        raise InputError(f"{what} takes a device such as 'cpu' or 'cuda:0', not {name!r}")
    try:
        device = torch.device(name)
    except (RuntimeError, ValueError, OverflowError) as error:
        raise InputError(f"{what}: {name!r} is no device; torch has 'cpu', 'cuda', 'cuda:0' and others") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"{what}: torch finds no CUDA device here, so nothing can go to {str(device)!r}; take 'cpu'")
    return device


def like(array: npt.NDArray[Any], original: object) -> Array:
    """A numpy result as the same kind of array as `original`, on its device. On the CPU nothing is copied."""
    if not is_torch(original):
        return array
    import torch

    array = np.ascontiguousarray(array).reshape(array.shape)
    if array.dtype == BFLOAT16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(original.device)
    return torch.from_numpy(array).to(original.device)


def of_either_kind(function: F) -> F:
    """Let a function of numpy arrays take torch tensors as well: then its results are tensors on the first's device."""

    @functools.wraps(function)
    def either(first: Array, *others: Any, **named: Any) -> Any:
        if not is_torch(first):
            return function(first, *others, **named)
        made = function(to_numpy(first), *(to_numpy(each) if is_torch(each) else each for each in others), **named)
        return tuple(like(each, first) for each in made) if isinstance(made, tuple) else like(made, first)

    return cast("F", either)


def float8_view(scales: Array, name: str) -> Array:
    """uint8 scale codes as a float8 view (e4m3 or e8m0), without a copy, in the dtype of torch or ml_dtypes."""
    if is_torch(scales):
        import torch

        return scales.view({"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}[name])
    import ml_dtypes

    array = cast("npt.NDArray[Any]", scales)
    view: npt.NDArray[Any] = array.view({"e4m3": ml_dtypes.float8_e4m3fn, "e8m0": ml_dtypes.float8_e8m0fnu}[name])
    return view


def output_dtype(dtype: object) -> np.dtype[np.generic]:
    """The numpy dtype for a name ("bfloat16", "bf16"), numpy dtype or torch dtype. Others cannot be decoded to."""
    if isinstance(dtype, str):
        name = dtype
    elif type(dtype).__module__ == "torch":
        name = str(dtype).removeprefix("torch.")
    else:
        try:
            name = np.dtype(cast("Any", dtype)).name
        except (TypeError, ValueError):
            name = str(dtype)
        name = "None" if dtype is None else name
    if name not in DTYPE_NAMES:
        raise unknown_name("output dtype", name, DTYPE_NAMES)
    return DTYPES[DTYPE_NAMES[name]]
