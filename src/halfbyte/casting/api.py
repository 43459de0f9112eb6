"""cast(): check, choose, call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from halfbyte.arrays import Array, is_torch, like
from halfbyte.backends.blocks import host_backend
from halfbyte.casting.report import CastReport, Label, add, describe
from halfbyte.casting.rows import check_not_empty, decodes_powers
from halfbyte.casting.scales import NVFP4, nvfp4_rule, result_contract
from halfbyte.casting.share import SHARES, cast_tensors
from halfbyte.casting.to_bfloat16 import cast_to_bfloat16
from halfbyte.casting.to_mxfp4 import cast_to_mxfp4
from halfbyte.casting.to_nvfp4 import Settings
from halfbyte.casting.verbatim import PLACEMENTS
from halfbyte.contracts import Contract, get_contract
from halfbyte.errors import BackendError, InputError, UnsupportedError, refuse_array, unknown_name
from halfbyte.formats import FORMATS, BlockFormat
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.types import QuantizedTensor

ALGORITHMS = ("optimal", "hybrid", "verbatim", "requantize")
TARGETS = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "bfloat16": "bfloat16", "bf16": "bfloat16"}
SOURCES = {"nvfp4": "mxfp4", "mxfp4": "nvfp4"}
"""The format that a cast to each format takes. A cast to bfloat16 takes any."""
WAY_OUT = "cast it to bfloat16, which takes any format, and quantize the result"


class CastOptions(TypedDict, total=False):
    """The keyword arguments of `cast`, described there."""

    m: str | None
    contract: str | Contract | None
    share: str
    name: str
    backend: str
    threads: int | None
    out: QuantizedTensor | None


@overload
def cast(
    q: QuantizedTensor,
    format: Literal["nvfp4", "mxfp4"] | BlockFormat,
    algorithm: str | None = None,
    **options: Unpack[CastOptions],
) -> tuple[QuantizedTensor, CastReport]: ...


@overload
def cast(
    q: Sequence[QuantizedTensor],
    format: Literal["nvfp4"] | BlockFormat,
    algorithm: str | None = None,
    **options: Unpack[CastOptions],
) -> tuple[list[QuantizedTensor], CastReport]: ...


@overload
def cast(
    q: QuantizedTensor,
    format: Literal["bfloat16", "bf16"],
    algorithm: str | None = None,
    **options: Unpack[CastOptions],
) -> tuple[Array, CastReport]: ...


@overload
def cast(
    q: QuantizedTensor | Sequence[QuantizedTensor],
    format: str | BlockFormat,
    algorithm: str | None = None,
    **options: Unpack[CastOptions],
) -> tuple[QuantizedTensor | list[QuantizedTensor] | Array, CastReport]: ...


def cast(
    q: QuantizedTensor | Sequence[QuantizedTensor],
    format: str | BlockFormat,
    algorithm: str | None = None,
    *,
    m: str | None = None,
    contract: str | Contract | None = None,
    share: str = "tensor",
    name: str = "tensor",
    backend: str = "auto",
    threads: int | None = None,
    out: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor | list[QuantizedTensor] | Array, CastReport]:
    """Turn a quantized tensor into another format, and report what that did to its values.

    MXFP4 to NVFP4 keeps every value wherever any choice of scales and codes does; docs/cast.md has the proof. A scale
    byte of 255 (NaN) is refused. NVFP4 to MXFP4 refuses NaN and Inf. To bfloat16 nothing is refused.

    q: the tensor; or, to NVFP4, a list of partners such as gate and up that have to share their global scales.
    format: "nvfp4" (from mxfp4), "mxfp4" (from nvfp4), "bfloat16" or torch.bfloat16 (from any).
    algorithm: to NVFP4 "optimal" (the default: lossless if anything is, else the least squared error found),
        "hybrid" (m = k_max - 8, blocks outside the window quantized again), "verbatim" (codes kept, scales snapped) or
        "requantize" (through bfloat16); to MXFP4 "optimal" or "requantize".
    m: for "verbatim": "search" (the default: the least error) or "midpoint".
    contract: defines how the result stores its global scale and how it is decoded (default: q·(S·g), zeros keep their
        sign); "requantize" quantizes by it (default: modelopt). One that is a cast itself,
        `hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4_lossless")`, gives that peer's bytes.
    share: "tensor" for one global scale, "expert" for one per index of the first axis: more blocks become exact. Each
        row of the result then carries its expert's. `report.costs` says what each way costs.
    name: what error messages call the tensor.
    backend, threads: as in `quantize`; neither changes a bit. The backend moves, decodes and quantizes blocks. The
        choice of scales is made in numpy under every backend.
    out: to NVFP4: a tensor of the same shape whose codes and scales are overwritten, which saves new memory.

    >>> import numpy as np, halfbyte as hb
    >>> source = hb.quantize(np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32), "mxfp4")
    >>> result, report = cast(source, "nvfp4")
    >>> report.label, report.spread, report.m, bool((hb.dequantize(result) == hb.dequantize(source)).all())
    ('bit-exact', 2, -8, True)
    """
    if are_flushed():
        again: Callable[..., tuple[QuantizedTensor | list[QuantizedTensor] | Array, CastReport]] = cast
        options: dict[str, Any] = {"share": share, "name": name, "backend": backend, "threads": threads, "out": out}
        with subnormals_kept():
            return again(q, format, algorithm, m=m, contract=contract, **options)
    target = _target(format)
    tensors = _tensors(q, name)
    _check(tensors, target, share, name)
    if out is not None and target != "nvfp4":
        raise UnsupportedError(f"a cast to {target} takes no out")
    if out is not None and not isinstance(out, QuantizedTensor):
        raise InputError(f"{name}: out must be a QuantizedTensor to write into, not {type(out).__name__}")
    if len(tensors) == 1 and 0 in tensors[0].shape:
        given: CastOptions = {"m": m, "contract": contract, "name": name, "backend": backend, "threads": threads}
        made, report = _cast_without_rows(tensors[0], format, algorithm, given, out)
        return (made if isinstance(q, QuantizedTensor) or not isinstance(made, QuantizedTensor) else [made]), report
    _check_algorithm(target, algorithm, m)
    _check_backend(tensors, backend, name)
    source = tensors[0]
    if target == "bfloat16":
        return cast_to_bfloat16(source, host_backend(backend), threads)
    if target == "mxfp4":
        return cast_to_mxfp4(source, algorithm or "optimal", contract, name, host_backend(backend), threads)
    settings = _settings(source, algorithm, m, contract, backend, threads)
    results, report = cast_tensors(tensors, name, share, settings, out)
    return (results[0] if isinstance(q, QuantizedTensor) else results), report


def _cast_without_rows(
    q: QuantizedTensor,
    format: str | BlockFormat,
    algorithm: str | None,
    given: CastOptions,
    out: QuantizedTensor | None,
) -> tuple[QuantizedTensor | Array, CastReport]:
    """A tensor without rows, cast as one row of zeros would be, without that row."""
    width, leading = q.shape[-1], q.shape[:-1]

    def row(part: Array) -> Array:
        empty = np.zeros((1, part.shape[-1]), np.uint8)
        return like(empty, part)

    one: Any = None if q.stored_scale is None else 1.0
    zeros = replace(
        q,
        shape=(1, width),
        codes=row(q.codes),
        scales=row(q.scales),
        stored_scale=one,
    )
    result: Any
    result, report = cast(zeros, format, algorithm, **given)
    nothing = add([])
    label: Label = "value-exact" if isinstance(result, np.ndarray) or is_torch(result) else "bit-exact"
    report = replace(describe(nothing, report.source, report.target, report.algorithm, q.shape), label=label)
    if not isinstance(result, QuantizedTensor):
        return result[:0].reshape(q.shape), report
    if out is not None and (out.format != result.format or out.shape != q.shape):
        raise InputError(f"out holds {out.format.name} of shape {out.shape}, but the result is nvfp4 of {q.shape}")
    codes, scales = (part[:0].reshape(*leading, part.shape[-1]) for part in (result.codes, result.scales))
    if out is not None:
        codes, scales = out.codes, out.scales
    return replace(result, shape=q.shape, codes=codes, scales=scales), report


def _target(format: str | BlockFormat) -> str:
    """The name of the target. A BlockFormat has to be the very format that the cast writes."""
    if isinstance(format, BlockFormat):
        if format.name not in SOURCES:
            raise unknown_name("target format of a cast", format.name, SOURCES)
        written = FORMATS[format.name]
        if changed := _differences(format, written):
            raise UnsupportedError(
                f"the target is called {format.name} but has {changed}; for another format, cast to bfloat16 and "
                "quantize the result"
            )
        if format.block != written.block:
            raise UnsupportedError(f"a cast to {format.name} has blocks of {written.block}, not {format.block}")
        return format.name
    name = format if isinstance(format, str) else _dtype_name(format)
    if name not in TARGETS:
        raise unknown_name("target of a cast", format, TARGETS)
    return TARGETS[name]


def _dtype_name(dtype: object) -> str:
    """The name of a dtype of torch, numpy or ml_dtypes."""
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype).removeprefix("torch.")
    return name if isinstance(name, str) else ""


def _differences(format: BlockFormat, real: BlockFormat) -> str:
    """What a format has otherwise than the real one of its name; empty if it decodes in the same way."""
    parts = [
        f"another {part} ({getattr(format, part).name})"
        for part in ("element", "scale")
        if getattr(format, part) != getattr(real, part)
    ]
    if format.has_global != real.has_global:
        parts.append(f"{'a' if format.has_global else 'no'} global scale")
    return " and ".join(parts)


def _tensors(q: QuantizedTensor | Sequence[QuantizedTensor], name: str) -> list[QuantizedTensor]:
    """The tensors to cast, as a list."""
    if isinstance(q, QuantizedTensor):
        return [q]
    try:
        tensors = list(q)
    except TypeError:
        tensors = []
    if not tensors or not all(isinstance(tensor, QuantizedTensor) for tensor in tensors):
        raise InputError(f"{name}: cast takes a QuantizedTensor, or a list of them that is not empty")
    return tensors


def _check(tensors: list[QuantizedTensor], target: str, share: str, name: str) -> None:
    """Whether the target fits the tensors."""
    refuse_array("share", share)
    if share not in SHARES:
        raise unknown_name("share", share, SHARES)
    for number, tensor in enumerate(tensors):
        called = name if len(tensors) == 1 else f"{name}[{number}]"
        if len(tensors) > 1 or not tensor.shape[-1]:
            check_not_empty(tensor, called)
        if target != "bfloat16":
            _check_source(tensor, target, called)
    if target != "nvfp4" and (len(tensors) > 1 or share != "tensor"):
        raise UnsupportedError(f"{target} has no global scale to share: cast the tensors one by one, without share")


def _check_source(q: QuantizedTensor, target: str, name: str) -> None:
    """Whether the bytes of a tensor mean what the cast to NVFP4 or MXFP4 takes them for."""
    wanted = FORMATS[SOURCES[target]]
    if q.format.name != wanted.name:
        raise UnsupportedError(f"{name}: no cast from {q.format.name} to {target}; it takes {wanted.name}; {WAY_OUT}")
    if changed := _differences(q.format, wanted):
        raise UnsupportedError(
            f"{name}: its format is called {wanted.name} but has {changed}, which no cast to {target} takes; {WAY_OUT}"
        )
    if q.format.block not in wanted.blocks:
        allowed = " or ".join(map(str, wanted.blocks))
        raise UnsupportedError(
            f"{name}: a cast from {wanted.name} to {target} takes blocks of {allowed}, not {q.format.block}; {WAY_OUT}"
        )
    if target == "nvfp4" and not decodes_powers(q.contract):
        raise UnsupportedError(
            f"{name}: contract {q.contract} does not decode mxfp4 as q·2^(byte−127), which a cast to nvfp4 relies on; "
            f"{WAY_OUT}"
        )


def _check_algorithm(target: str, algorithm: str | None, m: str | None) -> None:
    if target == "bfloat16" and algorithm is not None:
        raise UnsupportedError("a cast to bfloat16 decodes; it has no algorithm to choose")
    if m is not None and (target != "nvfp4" or algorithm != "verbatim"):
        raise UnsupportedError("m is chosen by the algorithm; only algorithm='verbatim' takes m")


def _check_backend(tensors: list[QuantizedTensor], backend: str, name: str) -> None:
    """Whether the backend is one, and takes the kind of array that the tensors have."""
    if host_backend(backend) != backend and not all(is_torch(tensor.codes) for tensor in tensors):
        raise BackendError(
            f"{name}: backend {backend} takes torch tensors on a GPU, not numpy arrays; choose backend='auto'"
        )


def _settings(
    source: QuantizedTensor,
    algorithm: str | None,
    m: str | None,
    contract: str | Contract | None,
    backend: str,
    threads: int | None,
) -> Settings:
    """Every default filled in."""
    if isinstance(contract, Contract) and contract.cast is not None:
        if algorithm is not None:
            raise UnsupportedError(f"{contract} is a cast itself; leave algorithm out, or name a plain contract")
        nvfp4_rule(contract)
        return Settings("peer", "search", contract, contract, backend, threads)
    chosen = "optimal" if algorithm is None else algorithm
    refuse_array("algorithm", chosen)
    if chosen not in ALGORITHMS:
        raise unknown_name("algorithm", chosen, ALGORITHMS)
    if m is not None and m not in PLACEMENTS:
        raise unknown_name("m", m, PLACEMENTS)
    quantizer = get_contract("modelopt" if contract is None else contract, NVFP4)
    nvfp4_rule(quantizer)
    held = quantizer if chosen == "requantize" else result_contract(contract, source)
    return Settings(chosen, m or "search", held, quantizer, backend, threads)
