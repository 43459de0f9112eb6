"""quantize() and dequantize(): check, choose, call."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import Array, is_torch, like, output_dtype, to_numpy
from halfbyte.backends import Request, choose_backend, choose_device_backend
from halfbyte.backends.cpu.hadamard import rotate_matrix
from halfbyte.backends.cpu.repack import has_kernels
from halfbyte.codec.bits import F32, FLOAT32_MAX, U8, dtype_name, widen
from halfbyte.contracts import CONTRACTS, Contract, DecodeRule, MXRule, NVFP4Rule, get_contract
from halfbyte.contracts.hadamard import GROUP, rotate
from halfbyte.contracts.spec import Rule, Scaling, Tile, defined_methods
from halfbyte.errors import InputError, UnsupportedError, unknown_name
from halfbyte.formats import BlockFormat, get_format
from halfbyte.methods import Amax, FourSix, Hessian, Method, Optimal, check_method_name
from halfbyte.on_device import decode_tensor, device_of, quantize_tensor
from halfbyte.types import QuantizedTensor

SCALINGS = ("tensor", "row")
PADDING_CONTRACTS = [name for name, make in CONTRACTS.items() if make().ragged == "pad"]


def quantize(
    x: Array,
    format: str | BlockFormat,
    contract: str | Contract | None = None,
    method: str | Method | None = None,
    block: int | None = None,
    tile: tuple[int, int] | None = None,
    scaling: Scaling | None = None,
    global_amax: object = None,
    backend: str = "auto",
    threads: int | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantize a tensor along its last axis to the bytes that a contract demands.

    NaN, Inf and all-zero tensors are not errors: each contract has its own rule (docs/contracts.md). -0.0 becomes code
    0 or 8 by contract. Values beyond the largest element saturate. A last axis that is not whole blocks is padded or
    refused, as the contract says.

    x: float32, float16 or bfloat16; a numpy array (bfloat16 from ml_dtypes) or a torch tensor, any leading shape.
    format: "nvfp4", "mxfp4" or "mxfp8".
    contract: whose bytes: a name, an instance such as `hb.contracts.torchao(two_level=False)`, or None for the format's
        default ("transformer_engine" for NVFP4, "ocp" for MX).
    method: "amax", "four_six", "sweep", an instance such as `hb.FourSix("mse", 256)`, or None for the contract's own.
    block: None for the format's block length, or 16 or 32.
    tile: None for one scale a (1, block); (16, 16) for one a square, where the contract has that.
    scaling: "tensor" for one global scale, "row" for one a row, where the contract has that.
    global_amax: the amax to use in place of the tensor's own, when several tensors share a global scale.
        A CUDA tensor given here is not looked at, because that would wait for the device.
    backend: "auto", "gpu" (CUDA tensors, which stay on their device), "cpu" (compiled) or "reference" (numpy). All
        give the same bits; "auto" takes the first that can.
    threads: how many may work; None: HALFBYTE_THREADS, or the processors there are. Never changes a bit.
    out: a QuantizedTensor of the same format and shape whose codes and scales are overwritten, which saves new memory.

    >>> q = quantize(np.linspace(-1, 1, 32, dtype=np.float32), "nvfp4")
    >>> q.codes.shape, q.scales.tolist(), f"{q.global_scale:.6f}"
    ((16,), [126, 126], '0.000372')
    """
    block_format = get_format(format, block)
    chosen = get_contract(contract, block_format)
    shape, name = _describe(x, block_format, chosen)
    rule = chosen.rule(block_format)
    if isinstance(rule, MXRule) and rule.blocks is not None and block_format.block not in rule.blocks:
        listed = ", ".join(map(str, rule.blocks))
        raise UnsupportedError(f"contract {chosen.name} has blocks of {listed}, not {block_format.block}")
    resolved = _resolve_method(method, chosen, rule, block_format)
    row_scaling = _resolve_scaling(scaling, chosen, rule, block_format)
    request = Request(
        format=block_format,
        contract=chosen,
        method=resolved,
        tile=_resolve_tile(tile, chosen, rule, block_format, row_scaling),
        scaling=row_scaling,
        dtype=name,
        threads=threads,
        device=device_of(x),
    )
    _check_search(request, shape[-1])
    rows = math.prod(shape[:-1])
    engine = choose_device_backend(backend, request)
    if engine is not None and is_torch(x):
        if not is_torch(global_amax):
            request = dataclasses.replace(
                request, global_amax=_check_global_amax(global_amax, rule, block_format, rows, row_scaling)
            )
            return quantize_tensor(x, shape, request, engine, out)
        _check_takes_amax(rule, block_format)
        return quantize_tensor(x, shape, request, engine, out, global_amax)
    matrix = _matrix(x, chosen, name, backend != "reference", threads)
    request = dataclasses.replace(
        request,
        global_amax=_check_global_amax(global_amax, rule, block_format, rows, row_scaling),
        out=None if out is None else _check_out(out, x, block_format, shape),
    )
    parts = choose_backend(backend, request).quantize(matrix, request)
    leading = shape[:-1]
    codes, scales = parts.codes, parts.scales
    if request.out is not None:
        for given, computed in zip(request.out, (codes, scales), strict=True):
            if computed is not given:
                np.copyto(given, computed)

    def scalar_or_rows(value: F32 | None) -> Array | None:
        return None if value is None else like(value.reshape(leading if row_scaling == "row" else ()), x)

    return QuantizedTensor(
        format=block_format,
        shape=shape,
        codes=like(codes.reshape(*leading, -1), x) if out is None else out.codes,
        scales=like(scales.reshape(*leading, -1), x) if out is None else out.scales,
        global_scale=scalar_or_rows(parts.global_scale),
        stored_scale=scalar_or_rows(parts.stored_scale),
        contract=chosen,
        method=resolved,
    )


def dequantize(
    q: QuantizedTensor,
    dtype: object = "float32",
    backend: str = "auto",
    threads: int | None = None,
    out: Array | None = None,
) -> Array:
    """Decode to float32 in the order of the contract's roundings; another dtype costs one more rounding.

    NaN scale bytes decode to NaN, code 8 to -0.0 or +0.0 as the contract says.

    dtype: "float32", "float16" or "bfloat16", or the numpy or torch dtype.
    out: an array of that dtype and q's shape to decode into, which saves new memory; it is what is returned.

    >>> q = quantize(np.float32([[1.0] * 16]), "nvfp4")
    >>> dequantize(q)[0, :3].tolist()
    [1.0, 1.0, 1.0]
    """
    wanted = output_dtype(dtype)
    device = device_of(q.codes)
    request = Request(
        q.format, q.contract, q.method, (1, q.format.block), "tensor", "fp32", threads=threads, device=device
    )
    rows, width = math.prod(q.shape[:-1]), q.shape[-1]
    if q.stored_scale is None and _stores_scale(q.contract.rule(q.format)):
        raise InputError(
            f"contract {q.contract.name} decodes {q.format.name} with a stored scale, and the tensor has none"
        )
    engine = choose_device_backend(backend, request, decoding=True)
    if engine is not None:
        return decode_tensor(q, request, engine, wanted, out)
    given = None if out is None else _check_decoded(out, q, wanted).reshape(rows, width)
    stored = None if q.stored_scale is None else to_numpy(q.stored_scale).reshape(-1)
    values = choose_backend(backend, request, decoding=True).dequantize(
        to_numpy(q.codes).reshape(rows, -1),
        to_numpy(q.scales).reshape(rows, -1),
        stored,
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


def _stores_scale(rule: Rule) -> bool:
    return isinstance(rule, NVFP4Rule) and rule.stored is not None


def _describe(x: Array, format: BlockFormat, contract: Contract) -> tuple[tuple[int, ...], str]:
    """The logical shape of the operand after the contract's transform, and its dtype's short name."""
    if is_torch(x):
        if str(x.layout) != "torch.strided":
            raise InputError(f"expected a dense torch tensor, got layout {x.layout}; call .to_dense() first")
        name = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}.get(str(x.dtype).removeprefix("torch."))
        if name is None:
            name = dtype_name(x.dtype)
    else:
        name = dtype_name(to_numpy(x).dtype)
    shape = tuple(x.shape)
    if not shape or 0 in shape:
        raise InputError(f"cannot quantize a tensor of shape {shape}: it has no elements along some axis")
    if contract.transform.columnwise:
        shape = (shape[-1], math.prod(shape[:-1]))
    width = shape[-1]
    if contract.transform.hadamard and width % GROUP:
        raise InputError(f"the Hadamard transform needs a block axis that is a multiple of {GROUP}, not {width}")
    if contract.ragged == "refuse" and width % format.block:
        raise InputError(
            f"shape {shape}: contract {contract.name} needs a last axis that is a multiple of {format.block}, not "
            f"{width}; pad the tensor, or choose a contract that pads ({', '.join(PADDING_CONTRACTS)})"
        )
    return shape, name


def _matrix(x: Array, contract: Contract, name: str, compiled: bool, threads: int | None) -> npt.NDArray[np.generic]:
    """The operand as a (rows, K) matrix after the contract's transform."""
    array = to_numpy(x)
    matrix: npt.NDArray[np.generic] = array.reshape(-1, array.shape[-1])
    transform = contract.transform
    if transform.columnwise:
        matrix = matrix.T
    if transform.hadamard and compiled and has_kernels():
        matrix = rotate_matrix(matrix, name, transform.random_signs, threads)
    elif transform.hadamard:
        rotated = rotate(widen(matrix), name, transform.random_signs)
        with np.errstate(over="ignore"):
            matrix = rotated.astype(array.dtype)  # exact: it was rounded to that dtype
    return matrix


def _check_out(out: QuantizedTensor, x: Array, format: BlockFormat, shape: tuple[int, ...]) -> tuple[U8, U8]:
    """The given outputs as (rows, K) matrices that share their memory."""
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
    return arrays[0], arrays[1]


def _check_decoded(out: Array, q: QuantizedTensor, dtype: np.dtype[np.generic]) -> npt.NDArray[np.generic]:
    """The given output of dequantize as a numpy array that shares its memory."""
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


def _resolve_method(method: str | Method | None, contract: Contract, rule: Rule, format: BlockFormat) -> Method:
    """The method as an instance that this contract defines for this format."""
    if isinstance(rule, DecodeRule):
        raise UnsupportedError(f"contract {contract.name} decodes {format.name} only: it has no quantizer for it")
    if method is None:  # presets such as 4over6 concern NVFP4; the MX formats of such a contract stay plain
        preset_fits = isinstance(rule, NVFP4Rule) or isinstance(contract.method, Optimal | Hessian)
        method = contract.method if preset_fits else Amax()
    known = defined_methods(rule)
    if isinstance(method, str):
        kind = check_method_name(method)
        if kind is Hessian:
            raise UnsupportedError("method 'hessian' needs its matrices: give hb.Hessian(h), h from activations")
        named = [candidate for candidate in known if isinstance(candidate, kind)]
        if not named:
            raise _undefined(method, contract, format, known)
        return named[0]
    if not isinstance(method, Method):
        raise unknown_name("method", method, ["a name", "hb.Amax()", "hb.FourSix(...)", "hb.Optimal(...)"])
    if isinstance(method, Optimal | Hessian):
        return method
    if isinstance(method, FourSix) and isinstance(rule, NVFP4Rule) and rule.four_six is not None:
        four_six = rule.four_six
        if (
            method.error in four_six.errors
            and method.e4m3_max in four_six.e4m3_maxes
            and (four_six.fast_error is not None or not method.fast_error)
        ):
            return method
        errors, maxes = ", ".join(four_six.errors), ", ".join(map(str, four_six.e4m3_maxes))
        fast = "False or True" if four_six.fast_error is not None else "False"
        raise UnsupportedError(
            f"contract {contract.name} has no {method}; it has error {errors}, e4m3_max {maxes}, fast_error {fast}"
        )
    if method not in known:
        raise _undefined(method, contract, format, known)
    return method


def _check_search(request: Request, width: int) -> None:
    """Whether an exact search fits the operand: one-dimensional blocks, weights and Hessians of its width."""
    method, block = request.method, request.format.block
    if not isinstance(method, Optimal | Hessian):
        return
    if request.tile[0] != 1:
        raise UnsupportedError(f"method {method.name} searches blocks of one row; tile {request.tile} spans several")
    if isinstance(method, Optimal) and method.channel_weights is not None and method.channel_weights.size != width:
        raise InputError(f"Optimal has {method.channel_weights.size} weights, but the last axis has {width} elements")
    if isinstance(method, Hessian) and (method.matrices.shape[0] * block != width or method.matrices.shape[1] != block):
        raise InputError(
            f"h has shape {method.matrices.shape}, but a last axis of {width} with blocks of {block} needs "
            f"({width / block:g}, {block}, {block})"
        )


def _undefined(method: object, contract: Contract, format: BlockFormat, known: list[Method]) -> UnsupportedError:
    listed = ", ".join(map(str, known))
    return UnsupportedError(
        f"contract {contract.name} does not define method {method} for {format.name}; it has {listed}"
    )


def _resolve_scaling(scaling: Scaling | None, contract: Contract, rule: Rule, format: BlockFormat) -> Scaling:
    if scaling is None:
        scaling = contract.scaling if isinstance(rule, NVFP4Rule) else "tensor"
    if scaling not in SCALINGS:
        raise unknown_name("scaling", scaling, SCALINGS)
    if scaling == "row":
        if not isinstance(rule, NVFP4Rule):
            raise UnsupportedError(f"{format.name} has no global scale, so scaling='row' has no meaning; leave it out")
        if not rule.row_scaling:
            raise UnsupportedError(
                f"contract {contract.name} has no row scaling here; transformer_engine and flashinfer's modes te and "
                "4over6 have it"
            )
    return scaling


def _resolve_tile(
    tile: tuple[int, int] | None, contract: Contract, rule: Rule, format: BlockFormat, scaling: Scaling
) -> Tile:
    """One row of a block, or a square tile where the contract has one."""
    if tile is None and isinstance(rule, NVFP4Rule):
        tile = contract.tile
    plain = (1, format.block)
    if tile is not None and not (isinstance(tile, tuple | list) and len(tile) == 2):
        raise UnsupportedError(f"tile is a pair such as {plain} or (16, 16), not {tile!r}")
    if tile is None or tuple(tile) == plain:
        return plain
    tiles = tuple(known for known in rule.tiles if known[1] == format.block) if isinstance(rule, NVFP4Rule) else ()
    if tuple(tile) not in tiles:
        listed = ", ".join(map(str, dict.fromkeys((plain, *tiles))))
        raise UnsupportedError(
            f"tile {tuple(tile)} does not fit: contract {contract.name} has {listed} for {format.name} with blocks of "
            f"{format.block}"
        )
    if scaling == "row":
        raise UnsupportedError(
            f"tile {tuple(tile)} spans rows, so it cannot have one global scale a row; use tile=None"
        )
    return (tile[0], tile[1])


def _check_takes_amax(rule: Rule, format: BlockFormat) -> None:
    if not isinstance(rule, NVFP4Rule) or rule.stored is None:
        raise UnsupportedError(f"{format.name} under this contract has no global scale; leave global_amax out")
    if rule.constant_factor is not None:
        raise UnsupportedError("this contract was made with a global_scale of its own; leave global_amax out")


def _check_global_amax(global_amax: object, rule: Rule, format: BlockFormat, rows: int, scaling: Scaling) -> F32 | None:
    """The given amax as float32 of shape () or (rows,)."""
    if global_amax is None:
        return None
    _check_takes_amax(rule, format)
    if isinstance(global_amax, float) and 0 <= global_amax <= FLOAT32_MAX and scaling != "row":
        return np.array([global_amax], np.float32)  # the usual case, which needs no further questions
    raw = to_numpy(cast("Any", global_amax)) if is_torch(global_amax) else np.asarray(global_amax)
    if raw.dtype.kind not in "iufbV":  # ml_dtypes report kind V
        raise InputError(f"global_amax must be a number or an array of numbers, got {global_amax!r}")
    with np.errstate(over="ignore"):
        amax = raw.astype(np.float32)
    if (np.isinf(amax) & np.isfinite(raw.astype(np.float64))).any():
        raise InputError("global_amax does not fit into float32")
    if np.isnan(amax).any() or (amax < 0).any():
        raise InputError(
            "global_amax must not be negative or NaN: it is the largest magnitude of the tensors that share it"
        )
    wanted = rows if scaling == "row" else 1
    if amax.size != wanted:
        raise InputError(f"global_amax has {amax.size} values, but scaling={scaling!r} needs {wanted}")
    return amax.reshape(-1)
