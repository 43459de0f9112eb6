"""gptq(): check, prepare the statistics, solve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, device_of, is_torch, like, to_numpy
from halfbyte.backends.amax import largest_magnitude
from halfbyte.backends.feedback import Feedback, raised, solve, solve_on_device
from halfbyte.backends.protocol import Parts
from halfbyte.backends.threads import check_threads
from halfbyte.codec.bits import F32, dtype_name, widen
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.feedback.factor import Factor, prepare
from halfbyte.foreign_arrays import needs_conversion, to_operand
from halfbyte.formats import E2M1, BlockFormat, get_format
from halfbyte.methods import Gptq
from halfbyte.quantize import check_global_amax, quantize
from halfbyte.request import Request, resolve
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.types import QuantizedTensor


def gptq(
    weight: Array,
    second_moment: object,
    format: str | BlockFormat,
    contract: str | Contract | None = None,
    *,
    cross_moment: object = None,
    asymmetry: float = 0.5,
    damping: float = 0.05,
    order: Literal["falling", "given"] = "falling",
    global_amax: object = None,
    descent: int = 0,
    headroom: float | tuple[float, ...] | None = None,
    backend: str = "auto",
    threads: int | None = None,
    device: str | None = None,
    name: str = "weight",
) -> QuantizedTensor:
    """Quantize a weight so that the output of its layer changes little: later columns make good each rounding error.

    The result is a QuantizedTensor like any other: same format, same contract, other codes and block scales. The tensor
    scale is that of the weight itself, times the headroom that `hb.Optimal` would choose for it, or of `global_amax`.

    weight: (rows, K), or any leading axes; numpy, torch, or what else `quantize` takes. It may not hold NaN or Inf.
    second_moment: (K, K), the mean of x·xᵀ over the inputs x of the layer; or a `Factor` from `feedback.prepare`, which
        several weights with the same input share. A Factor has its own options: leave asymmetry, damping, order,
        descent, headroom and cross_moment out.
    format, contract: as in `quantize`; NVFP4 or MXFP4, with blocks of one row.
    cross_moment: (K, K), the mean of (x_float − x)·xᵀ, if x comes from layers that are already quantized and x_float
        from the unquantized model. The target moves by `asymmetry` times what would restore the unquantized outputs.
    damping, order, descent, headroom: see `hb.Gptq`.
    global_amax, threads: as in `quantize`.
    backend: "auto", "cpu" (compiled) or "reference" (numpy); these two give the same bits. A CUDA tensor is solved on
        its GPU by "auto" or "gpu", with the same bits if the Factor was made on the CPU.
    device: "cuda" solves on a GPU whatever holds the weight; the result is where the weight is.
    name: how errors call the weight.
    """
    if are_flushed():
        again: dict[str, Any] = {"damping": damping, "order": order, "asymmetry": asymmetry, "descent": descent}
        again |= {
            "headroom": headroom,
            "global_amax": global_amax,
            "backend": backend,
            "threads": threads,
            "device": device,
            "name": name,
        }
        with subnormals_kept():
            return gptq(weight, second_moment, format, contract, cross_moment=cross_moment, **again)
    request = request_for(format, contract, threads)
    if needs_conversion(weight):
        weight = to_operand(weight)
    if not (is_torch(weight) or isinstance(weight, np.ndarray)):
        raise InputError(f"{name} must be a numpy array or a torch tensor, not {type(weight).__name__}")
    on_gpu = device is not None and device_of(device, "gptq(device=…)").type != "cpu"
    options = Gptq(damping=damping, order=order, asymmetry=asymmetry, descent=descent, headroom=headroom)
    if isinstance(second_moment, Factor):
        factor = second_moment
        if cross_moment is not None:
            raise InputError(f"{name}: a Factor holds its cross moments already; give them to feedback.prepare")
        if options not in (Gptq(), factor.method):
            raise InputError(
                f"{name}: a Factor has its own options, {factor.method!r}; leave asymmetry, damping, order, descent "
                "and headroom out, or give them to feedback.prepare"
            )
    else:
        factor = prepare(
            second_moment,
            request.format.block,
            options,
            cross_moment=cross_moment,
            device=device if on_gpu else None,
            name=f"{name}: second_moment",
        )
    if on_gpu and not (is_torch(weight) and weight.is_cuda):
        return _moved(weight, factor, request, global_amax, str(device), name)
    return solve_weight(weight, factor, request, global_amax=global_amax, backend=backend, name=name)


def _moved(
    weight: Array, factor: Factor, request: Request, global_amax: object, device: str, name: str
) -> QuantizedTensor:
    """Solve on a device and bring the result back to where the weight is."""
    import torch

    tensor = weight if is_torch(weight) else torch.from_numpy(widen(to_numpy(weight)))
    q = solve_weight(tensor.to(device), factor, request, global_amax=global_amax, backend="auto", name=name)

    def back(part: Array | None) -> Array | None:
        return None if part is None else like(to_numpy(part), weight)

    codes, scales = back(q.codes), back(q.scales)
    if codes is None or scales is None:
        raise TypeError("a quantized tensor has codes and scales")
    return replace(q, codes=codes, scales=scales, stored_scale=back(q.stored_scale))


def solve_weight(
    weight: Array, factor: Factor, request: Request, *, global_amax: object, backend: str, name: str
) -> QuantizedTensor:
    """Quantize a weight under a request of `request_for` with a prepared factor."""
    on_card = is_torch(weight) and weight.is_cuda and backend in ("auto", "gpu", "triton")
    shape = tuple(weight.shape)
    if len(shape) < 1 or shape[-1] != factor.width:
        raise InputError(f"{name} has shape {shape}, but the second moments are those of {factor.width} inputs")
    if factor.block != request.format.block:
        raise InputError(
            f"{name}: the factor was prepared for blocks of {factor.block}, {request.format.name} has "
            f"{request.format.block}"
        )
    if 0 in shape:
        empty = quantize(weight, request.format, request.contract, "amax", global_amax=global_amax)
        return replace(empty, method=factor.method)
    if on_card:
        return _on_card(weight, factor, request, global_amax, name)
    if not isinstance(factor.feedback, Feedback):
        raise InputError(f"{name}: the factor is on a GPU, the weight is not; prepare it without a device")
    array = to_numpy(weight)
    dtype_name(array.dtype)
    matrix = np.ascontiguousarray(widen(array).reshape(-1, factor.width))
    largest = float(largest_magnitude(matrix, threads=request.threads))
    if not np.isfinite(largest):
        raise InputError(f"{name} of shape {shape} holds NaN or Inf, which no feedback can make good; replace them")
    solving = replace(request, method=factor.feedback.objective)
    amax, own = _amax(matrix, request, global_amax, shape, largest)
    if amax is not None and own:
        amax = raised(matrix, solving, factor.method.headroom, amax, backend)
    return _result(weight, solve(matrix, solving, factor.feedback, amax, backend), factor, request)


def _on_card(weight: Any, factor: Factor, request: Request, global_amax: object, name: str) -> QuantizedTensor:
    """The same for a tensor on a GPU."""
    matrix = weight.detach().float().reshape(-1, factor.width).contiguous()
    largest = float(matrix.abs().max())
    if not np.isfinite(largest):
        raise InputError(f"{name} of shape {tuple(weight.shape)} holds NaN or Inf; replace them")
    given = check_global_amax(global_amax, request, tuple(weight.shape))
    needs = isinstance(request.rule, NVFP4Rule)
    amax = np.array([largest], np.float32) if given is None and needs else given
    solving = replace(request, method=factor.feedback.objective)
    parts = solve_on_device(matrix, solving, factor.feedback, amax, given is None, factor.method.headroom)
    return _result(weight, parts, factor, request)


def _result(weight: Array, parts: Parts[Any], factor: Factor, request: Request) -> QuantizedTensor:
    """Parts of a matrix as a tensor of the weight's kind and shape."""
    shape = tuple(weight.shape)
    leading = shape[:-1]

    def scalar_or_rows(value: Any) -> Array | None:
        return None if value is None else _as(value.reshape(leading if request.scaling == "row" else ()), weight)

    return QuantizedTensor(
        format=request.format,
        shape=shape,
        codes=_as(parts.codes.reshape(*leading, -1), weight),
        scales=_as(parts.scales.reshape(*leading, -1), weight),
        global_scale=scalar_or_rows(parts.global_scale),
        stored_scale=scalar_or_rows(parts.stored_scale),
        contract=request.contract,
        method=factor.method,
    )


def _as(value: Any, weight: Array) -> Array:
    return value if is_torch(value) else like(value, weight)


def request_for(
    format: str | BlockFormat, contract: str | Contract | None = None, threads: int | None = None
) -> Request:
    """The request that `quantize` would have, checked for what feedback cannot do."""
    wanted = get_format(format)
    if wanted.element != E2M1:
        raise UnsupportedError(f"gptq quantizes to nvfp4 and mxfp4, not to {wanted.name}")
    request = resolve(wanted, contract, "amax", dtype="fp32", threads=check_threads(threads))
    transform = request.contract.transform
    if transform.hadamard or transform.columnwise:
        raise UnsupportedError(
            f"contract {request.contract!r} transforms the weight before it is quantized, so the second moments of the "
            "inputs do not belong to what is rounded; take a contract without a transform"
        )
    if request.tile[0] != 1:
        raise UnsupportedError(f"gptq chooses scales for blocks of one row; tile {request.tile} spans several")
    return request


def _amax(
    matrix: npt.NDArray[Any], request: Request, global_amax: object, shape: tuple[int, ...], largest: float
) -> tuple[F32 | None, bool]:
    """The amax that tensor scales come from: the given one, or the weight's own, and whether it is that."""
    given = check_global_amax(global_amax, request, shape)
    if given is not None or not isinstance(request.rule, NVFP4Rule):
        return given, False
    if request.scaling == "row":
        return np.asarray(np.abs(matrix).max(axis=1), np.float32), True
    return np.array([largest], np.float32), True
