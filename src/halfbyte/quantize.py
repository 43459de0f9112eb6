"""quantize() and dequantize(): resolve, check, call."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, is_torch, like, to_numpy
from halfbyte.backends import Parts
from halfbyte.codec.bits import F32, FLOAT32_MAX, U8
from halfbyte.contracts import Contract
from halfbyte.contracts.spec import Scaling, Transform
from halfbyte.device_calls import dequantize_on_card, is_on_card, quantize_on_card
from halfbyte.errors import InputError, refuse_array
from halfbyte.experts import by_expert
from halfbyte.foreign_arrays import NeedsConversion, imported, move_axis, needs_conversion, to_operand
from halfbyte.formats import BlockFormat
from halfbyte.methods import Method
from halfbyte.on_device import decode_tensor, quantize_tensor
from halfbyte.one_call import dequantize_at_once, quantize_at_once
from halfbyte.prepared import prepare, prepare_decoding
from halfbyte.request import Arguments, Request, check_shape, check_takes_amax, stores_scale
from halfbyte.subnormals import HALF, LEAST, subnormals_kept
from halfbyte.tensor_parts import per_row
from halfbyte.tracing import dequantize_traced, is_tracing, quantize_traced
from halfbyte.types import QuantizedTensor, missing_scale

LARGEST = float(FLOAT32_MAX)


def _is_expert(scaling: object) -> bool:
    refuse_array("scaling", scaling)
    return scaling == "expert"


def quantize(
    x: Array,
    format: str | BlockFormat,
    contract: str | Contract | None = None,
    method: str | Method | None = None,
    block: int | None = None,
    tile: tuple[int, int] | None = None,
    scaling: Scaling | Literal["expert"] | None = None,
    global_amax: object = None,
    backend: str = "auto",
    threads: int | None = None,
    out: QuantizedTensor | None = None,
    axis: int = -1,
) -> QuantizedTensor:
    """Quantize a tensor to the bytes that a contract defines. Blocks run along the last axis, or along `axis`.

    NaN, Inf and all-zero tensors are not errors: each contract has a rule for them (docs/contracts.md). -0.0 becomes
    code 0 or 8, as the contract says. Values beyond the largest element saturate. If the length of the last axis is not
    a multiple of the block, the contract either pads the tensor or raises an error.

    x: float32, float16 or bfloat16; a torch tensor or a numpy array (bfloat16 from ml_dtypes), with any leading axes.
        The results are of the same kind, on the same device. float64 is rounded once to float32; a finite value that
        would become Inf raises. Arrays of other libraries (jax, mlx, anything with `__dlpack__` or `__array__`) are
        copied to numpy, or to torch if they are on a GPU.
    format: "nvfp4", "mxfp4" or "mxfp8".
    contract: the project whose bytes to produce: a name, an instance such as `hb.contracts.torchao(two_level=False)`,
        or None for the format's default ("transformer_engine" for NVFP4, "ocp" for MX).
    method: how each block's scale is chosen; None for the contract's own method. A name has the contract's own options;
        options follow after colons. `halfbyte contracts` lists what each contract takes.
        "amax": the largest magnitude gets the largest code. Every contract.
        "four_six", "four_six:mse:256", "four_six:mae:448:fast_error" or `hb.FourSix("mse", 256)`: the largest
        magnitude becomes 6 or 4. transformer_engine, miles, modelopt, fouroversix, flashinfer(mode="4over6").
        "sweep", "sweep:fused" or `hb.Sweep(fused=True)`: Model-Optimizer's search of all scales. modelopt.
        "optimal", "optimal:headroom=1" or `hb.Optimal(weights)`: the scale with the least squared, or weighted, error;
        the tensor scale of NVFP4 is the best of a few. Every contract.
        `hb.Hessian(h, codes="descent")`: the scale with the least error of a layer's output. Every contract.
        `hb.gptq`: a function of its own, because it chooses codes too and needs statistics.
    block: None for the format's block length, or 16 or 32.
    tile: None for one scale per block of one row; (16, 16) for one scale per square, if the contract has square tiles.
    scaling: "tensor" for one global scale; "row" for one per row, if the contract has row scaling; "expert" for one
        per index of the first axis of a 3-D tensor, which equals quantizing each matrix alone.
    global_amax: the amax to use instead of the tensor's own, when several tensors share a global scale. One number; one
        per row or per expert where `scaling` says so. If it is a CUDA tensor, its values are not checked, because a
        check would wait for the device.
    backend: "auto", "gpu" (CUDA tensors, which stay on their device), "cpu" (compiled) or "reference" (numpy). All
        give the same bits; "auto" takes the first backend that can serve the call.
    threads: the number of threads; None: HALFBYTE_THREADS, or the number of processors. It never changes a bit.
    out: a QuantizedTensor of the same format and shape. Its codes and scales are overwritten, so no memory is allocated
        for them.
    axis: the axis to cut into blocks. It is moved to the end first, so the result has the shape of
        `x.movedim(axis, -1)`, and so have the decoded values: `hb.dequantize(q).movedim(-1, axis)` turns them back.

    >>> import torch
    >>> q = quantize(torch.linspace(-1, 1, 32), "nvfp4", method="four_six:mse")
    >>> q.codes.shape, q.scales.tolist(), f"{q.global_scale:.6f}"
    (torch.Size([16]), [126, 126], '0.000372')
    >>> quantize(torch.ones(64, 3), "mxfp4", axis=0).shape
    (3, 64)
    """
    if type(axis) is not int or axis != -1 or (scaling is not None and _is_expert(scaling)):
        call = Arguments(format, contract, method, block, tile, scaling, global_amax, backend, threads, out)
        moved = move_axis(x, axis)
        return by_expert(quantize, moved, call) if _is_expert(scaling) else quantize(moved, *call)
    arguments = (format, contract, method, block, tile, scaling, global_amax, backend, threads, out)
    if is_tracing() and is_torch(x):
        return quantize_traced(x, Arguments(*arguments))
    if LEAST * HALF == 0.0:  # subnormal numbers are flushed (subnormals.py)
        with subnormals_kept():
            return quantize(x, *arguments)
    if is_on_card(x):
        on_card = quantize_on_card(x, *arguments)
        if on_card is not None:
            return on_card
    try:
        kept = prepare(x, format, contract, method, block, tile, scaling, backend, threads)
    except NeedsConversion:
        return quantize(to_operand(x), *arguments)
    request, engine = kept.request, kept.engine
    room = None
    if out is not None and not engine.takes_tensors:
        room = _check_out(out, x, request.format, check_shape(request, tuple(x.shape)))
    if kept.whole is not None:
        known = -1.0 if global_amax is None else _one_amax(global_amax, request)
        made = None if known is None else quantize_at_once(x, request, kept.whole, known, out)
        if made is not None:
            return made
    shape = check_shape(request, tuple(x.shape))
    if 0 in shape:
        return _without_rows(x, shape, request, global_amax, backend, out)
    if engine.takes_tensors and is_torch(x):
        given = global_amax if is_torch(global_amax) else check_global_amax(global_amax, request, shape)
        return quantize_tensor(x, shape, request, engine, out, given)
    array = to_numpy(x)
    matrix: npt.NDArray[Any] = array.reshape(-1, array.shape[-1])
    if request.contract.transform.columnwise:
        matrix = matrix.T
    parts = engine.quantize(matrix, request, check_global_amax(global_amax, request, shape), room)
    leading = shape[:-1]
    codes, scales = parts.codes, parts.scales
    if room is not None:
        for target, computed in zip(room, (codes, scales), strict=True):
            if computed is not target:
                np.copyto(target, computed)

    def scalar_or_rows(value: F32 | None) -> Array | None:
        return None if value is None else like(value.reshape(leading if request.scaling == "row" else ()), x)

    return QuantizedTensor.trusted(
        format=request.format,
        shape=shape,
        codes=like(codes.reshape(*leading, -1), x) if out is None else out.codes,
        scales=like(scales.reshape(*leading, -1), x) if out is None else out.scales,
        global_scale=scalar_or_rows(parts.global_scale),
        stored_scale=scalar_or_rows(parts.stored_scale),
        contract=request.contract,
        method=request.method,
    )


def dequantize(
    q: QuantizedTensor,
    dtype: object = "float32",
    backend: str = "auto",
    threads: int | None = None,
    out: Array | None = None,
) -> Array:
    """Decode to float32 in the order of the contract's roundings. For another dtype the result is rounded once more.

    NaN scale bytes decode to NaN. Code 8 decodes to -0.0 or +0.0, as the contract says.

    q: what `quantize` gives, or a QuantizedTensor made from bytes. The result has its shape, and is a torch tensor on
        its device or a numpy array, as its parts are.
    dtype: "float32", "float16" or "bfloat16", or the numpy or torch dtype.
    backend, threads: as in `quantize`.
    out: an array of that dtype and of q's shape. The values are written into it and it is returned, so no memory is
        allocated.

    >>> import torch
    >>> q = quantize(torch.ones(1, 16), "nvfp4")
    >>> dequantize(q, torch.bfloat16)[0, :3]
    tensor([1., 1., 1.], dtype=torch.bfloat16)
    """
    if not isinstance(q, QuantizedTensor):
        raise InputError(f"dequantize takes a QuantizedTensor, not {type(q).__name__}; quantize() makes one")
    if is_tracing() and is_torch(q.codes):
        return dequantize_traced(q, dtype, backend, threads, out)
    if LEAST * HALF == 0.0:
        with subnormals_kept():
            return dequantize(q, dtype, backend, threads, out)
    if is_on_card(q.codes):
        from_card = dequantize_on_card(q, dtype, backend, threads, out)
        if from_card is not None:
            return from_card
    kept = prepare_decoding(q, dtype, backend, threads)
    request, engine, wanted = kept.request, kept.engine, kept.dtype
    if q.stored_scale is None and stores_scale(kept.rule):
        raise InputError(missing_scale(q))
    if 0 in q.shape:
        return like(np.empty(q.shape, wanted) if out is None else _check_decoded(out, q, wanted), q.codes)
    if kept.whole is not None and out is None:
        decoded = dequantize_at_once(q, kept.whole, wanted)
        if decoded is not None:
            return decoded
    rows, width = math.prod(q.shape[:-1]), q.shape[-1]
    if engine.takes_tensors:
        return decode_tensor(q, request, engine, wanted, out)
    given = None if out is None else _check_decoded(out, q, wanted).reshape(rows, width)
    stored = None if q.stored_scale is None else to_numpy(per_row(q.stored_scale, q.shape))
    values = engine.dequantize(
        Parts(to_numpy(q.codes).reshape(rows, -1), to_numpy(q.scales).reshape(rows, -1), stored),
        (rows, width),
        request,
        wanted,
        given,
    )
    if out is None:
        return like(values.reshape(q.shape), q.codes)
    if given is not None and values is not given:
        np.copyto(given, values)
    return out


def _without_rows(
    x: Array, shape: tuple[int, ...], request: Request, global_amax: object, backend: str, out: QuantizedTensor | None
) -> QuantizedTensor:
    """A tensor without rows has no codes and no scales; its global scale is that of a row of zeros."""
    if out is not None:
        _check_out(out, x, request.format, shape)
    width, leading = shape[-1], shape[:-1]
    zeros = x.new_zeros((1, width)) if is_torch(x) else np.zeros((1, width), to_numpy(x).dtype)
    contract = replace(request.contract, transform=Transform())
    by_row = request.scaling == "row"
    one = quantize(
        zeros, request.format, contract, request.method, scaling=request.scaling,
        global_amax=None if by_row else global_amax, backend=backend,
    )  # fmt: skip

    def empty(part: Array) -> Array:
        return part[:0].reshape(*leading, part.shape[-1])

    def scale(value: Array | None) -> Array | None:
        return value[:0].reshape(leading) if value is not None and by_row else value

    return replace(
        one,
        shape=shape,
        codes=empty(one.codes) if out is None else out.codes,
        scales=empty(one.scales) if out is None else out.scales,
        stored_scale=scale(one.stored_scale),
        contract=request.contract,
    )


def _check_out(out: QuantizedTensor, x: Array, format: BlockFormat, shape: tuple[int, ...]) -> tuple[U8, U8]:
    """The arrays of `out` as (rows, K) matrices that share their memory."""
    if not isinstance(out, QuantizedTensor):
        raise InputError(f"out must be a QuantizedTensor, not {type(out).__name__}")
    if out.format != format or out.shape != shape:
        raise InputError(
            f"out holds {out.format.name} of shape {out.shape}, but the result is {format.name} of {shape}"
        )
    if is_torch(out.codes) != is_torch(x) or is_torch(out.scales) != is_torch(x):
        raise InputError("out must hold the same kind of arrays as x: numpy or torch")
    arrays = []
    for part in (out.codes, out.scales):
        array = to_numpy(part)
        on_cpu = not is_torch(part) or part.device.type == "cpu"
        if not (on_cpu and array.flags.c_contiguous and array.flags.writeable):
            raise InputError("out must be contiguous, writable and on the CPU")
        if np.shares_memory(array, to_numpy(x)):
            raise InputError("out overlaps the input")
        arrays.append(array.reshape(-1, array.shape[-1]))
    if np.shares_memory(arrays[0], arrays[1]):
        raise InputError("out.codes and out.scales overlap")
    return arrays[0], arrays[1]


def _check_decoded(out: Array, q: QuantizedTensor, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """The `out` of dequantize as a numpy array that shares its memory."""
    if is_torch(out) != is_torch(q.codes):
        raise InputError("out must be the same kind of array as q holds: numpy or torch")
    array = to_numpy(out)
    if tuple(array.shape) != q.shape or array.dtype != dtype:
        raise InputError(f"out is {array.dtype} of shape {tuple(array.shape)}, but the result is {dtype} of {q.shape}")
    on_cpu = not is_torch(out) or out.device.type == "cpu"
    if not (on_cpu and array.flags.c_contiguous and array.flags.writeable):
        raise InputError("out must be contiguous, writable and on the CPU")
    if any(np.shares_memory(array, to_numpy(part)) for part in (q.codes, q.scales)):
        raise InputError("out overlaps the tensor to decode")
    return array


def _array_of(numbers: object) -> npt.NDArray[Any]:
    """Numbers as an array; one of objects if they are none, such as lists of unequal lengths."""
    if needs_conversion(numbers) and not isinstance(numbers, np.ndarray):
        return to_numpy(imported(numbers))
    try:
        return np.asarray(numbers)
    except ValueError:
        return np.empty(0, object)


def _one_amax(global_amax: object, request: Request) -> float | None:
    """The given amax if it is a plain number that needs no further checks, else None."""
    if not isinstance(global_amax, float | np.float32) or not 0 <= global_amax <= LARGEST:
        return None
    check_takes_amax(request)
    return abs(float(global_amax))


def check_global_amax(global_amax: object, request: Request, shape: tuple[int, ...]) -> F32 | None:
    """The given amax as float32 of shape (1,) or (rows,)."""
    if global_amax is None:
        return None
    check_takes_amax(request)
    scaling = request.scaling
    if isinstance(global_amax, float) and 0 <= global_amax <= LARGEST and scaling != "row":
        return np.array([abs(global_amax)], np.float32)  # the usual case needs no further checks
    raw = to_numpy(cast("Any", global_amax)) if is_torch(global_amax) else _array_of(global_amax)
    if raw.dtype.kind not in "iufbV":  # ml_dtypes report kind V
        raise InputError(f"global_amax must be a number or an array of numbers, got {global_amax!r}")
    with np.errstate(over="ignore"):
        amax = raw.astype(np.float32) + np.float32(0)  # −0.0 becomes +0.0
    if (np.isinf(amax) & np.isfinite(raw.astype(np.float64))).any():
        raise InputError("global_amax does not fit into float32")
    if np.isnan(amax).any() or (amax < 0).any():
        raise InputError(
            "global_amax must not be negative or NaN: it is the largest magnitude of the tensors that share it"
        )
    wanted = math.prod(shape[:-1]) if scaling == "row" else 1
    if amax.size != wanted:
        raise InputError(f"global_amax has {amax.size} values, but scaling={scaling!r} needs {wanted}")
    return amax.reshape(-1)
