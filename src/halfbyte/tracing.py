"""quantize() and dequantize() while torch.compile traces them: one operator of PyTorch each, without a graph break.

An operator takes tensors and plain values alone. So all other arguments are looked up when the call is traced, and the
operator gets a name for them. The name is made from what they are, because torch.compile may keep graphs on disk.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib
import os
import sys
import types
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from halfbyte.arrays import is_torch, output_dtype
from halfbyte.codec.bits import DTYPES
from halfbyte.contracts import NVFP4Rule
from halfbyte.errors import UnsupportedError
from halfbyte.request import Arguments, Request, resolve, resolve_decoding, stores_scale
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

OPERATORS = "halfbyte.torch_ops"
"""The module that defines the operators. It needs `quantize` itself, so it is imported by name."""


class Traced(NamedTuple):
    """A call without its tensors."""

    request: Request
    backend: str
    has_multiplier: bool
    has_stored: bool
    dtype: str = ""
    """Decoding: the short name of the dtype of the values."""


CALLS: dict[str, Traced] = {}
"""The traced calls by name. A compiled graph needs its own for as long as the process lives."""


def is_tracing() -> bool:
    """Whether torch.compile is tracing. If torch was never imported, nothing can."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.compiler.is_compiling()


def quantize_traced(x: torch.Tensor, given: Arguments) -> QuantizedTensor:
    """What `quantize` returns."""
    import torch

    name = quantizing(
        handle(given.format), handle(given.contract), handle(given.method),
        given.block, given.tile, given.scaling, given.backend, given.threads, str(x.dtype), str(x.device.type),
    )  # fmt: skip
    call, global_amax, out = CALLS[name], given.global_amax, given.out
    tensor = global_amax if is_torch(global_amax) else None
    number = None if tensor is not None or global_amax is None else float(global_amax)
    codes, scales, multiplier, stored = torch.ops.halfbyte.quantize_traced(x, name, tensor, number)
    if out is not None:
        into: Any = out
        codes, scales = into.codes.copy_(codes), into.scales.copy_(scales)
    width = x.shape[-1]
    shape = (width, x.numel() // width) if call.request.contract.transform.columnwise else tuple(x.shape)
    q = QuantizedTensor(
        call.request.format,
        shape,
        codes,
        scales,
        None,
        stored if call.has_stored else None,
        call.request.contract,
        call.request.method,
    )
    object.__setattr__(q, "_multiplier", multiplier if call.has_multiplier else None)
    return q


def dequantize_traced(q: QuantizedTensor, dtype: Any, backend: Any, threads: Any, out: Any) -> torch.Tensor:
    """What `dequantize` returns."""
    import torch

    codes: Any = q.codes
    wanted = dtype if isinstance(dtype, str | torch.dtype) else handle(dtype)
    device = str(codes.device.type)
    name = decoding(handle(q.format), handle(q.contract), handle(q.method), wanted, backend, threads, device)
    values: torch.Tensor = torch.ops.halfbyte.dequantize_traced(codes, q.scales, q.stored_scale, list(q.shape), name)
    return values if out is None else out.copy_(values)


def handle(value: Any) -> Any:
    """What stands for an object in the arguments of the functions below; names and None stand for themselves.

    torch before 2.13 hands only plain values to a function that it calls while it traces. It knows `id`, and compiles
    again if the object is another one.
    """
    return value if value is None or isinstance(value, str) else (id(value),)


def behind(handle: Any) -> Any:
    """The object that a handle stands for. It is an argument of the call that is being traced, so it is alive."""
    return ctypes.cast(handle[0], ctypes.py_object).value if isinstance(handle, tuple) else handle


# --- looked up when a call is traced ---


def quantizing(
    format: Any, contract: Any, method: Any, block: Any, tile: Any, scaling: Any, backend: str, threads: Any,
    dtype: str, device: str,
) -> str:  # fmt: skip
    """The name of a call of quantize. Format, contract and method are handles."""
    short = {"torch.float64": "fp32", "torch.float32": "fp32", "torch.float16": "fp16", "torch.bfloat16": "bf16"}.get(
        dtype
    )
    if short is None:
        raise UnsupportedError(f"cannot quantize dtype {dtype.removeprefix('torch.')}: give a float tensor")
    request = resolve(
        behind(format), behind(contract), behind(method),
        block=block, tile=tile, scaling=scaling, dtype=short, threads=threads, device=device,
    )  # fmt: skip
    rule = request.contract.rule(request.format)
    return _remembered(Traced(request, backend, isinstance(rule, NVFP4Rule), stores_scale(rule)))


def decoding(format: Any, contract: Any, method: Any, dtype: Any, backend: str, threads: Any, device: str) -> str:
    """The name of a call of dequantize. Format, contract and method are handles, as is a dtype without a name."""
    request = resolve_decoding(behind(format), behind(contract), behind(method), threads, device)
    wanted = output_dtype(behind(dtype))
    short = next(name for name, known in DTYPES.items() if known == wanted)
    return _remembered(Traced(request, backend, False, False, short))


# What torch.compiler.assume_constant_result does, without importing torch: tracing calls these and keeps the answer.
vars(quantizing)["_dynamo_marked_constant"] = True
vars(decoding)["_dynamo_marked_constant"] = True


def _remembered(call: Traced) -> str:
    """A name that says which call this is: equal calls have equal names, in every process."""
    importlib.import_module(OPERATORS)
    request = call.request
    try:
        digest = hashlib.sha256("\n".join(_described(call)).encode()).hexdigest()
    except TypeError:  # a contract made by hand, with functions or classes of its own
        digest = os.urandom(16).hex()
    name = f"{request.format.name} {request.contract.name} {request.method.name} {digest}"
    CALLS.setdefault(name, call)
    return name


def _described(value: object) -> Iterator[str]:
    """All that a value consists of, as text. TypeError: it holds something that text cannot stand for."""
    if value is None or isinstance(value, str | int | float | np.generic):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape} {hashlib.sha256(value.tobytes()).hexdigest()}"
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _described(key)
            yield from _described(value[key])
    elif isinstance(value, tuple | list):
        yield f"{len(value)} parts"
        for part in value:
            yield from _described(part)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield f"{type(value).__module__}.{type(value).__qualname__}"
        for field in dataclasses.fields(value):
            yield from _described(getattr(value, field.name))
    elif isinstance(value, functools.partial):
        yield from _described((value.func, value.args, value.keywords))
    elif isinstance(value, types.FunctionType) and "<" not in value.__qualname__:
        yield f"{value.__module__}.{value.__qualname__}"
    else:
        raise TypeError(f"{value!r} has no description")
