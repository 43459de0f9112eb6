"""Who shares a global scale: a tensor, each expert of a stack, partners such as gate and up; and what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from halfbyte.arrays import is_torch, like, to_numpy
from halfbyte.casting.device import keep_on_device
from halfbyte.casting.measure import rows_of
from halfbyte.casting.report import CastReport, ShareCost, Tally, add
from halfbyte.casting.rows import Rows, read
from halfbyte.casting.scales import NVFP4
from halfbyte.casting.to_nvfp4 import Cast, Member, Settings, Sharers, assemble, cast_together, describe_scaled
from halfbyte.casting.window import BIAS, NO_BLOCKS, join
from halfbyte.codec.bits import U8, power_of_two
from halfbyte.errors import InputError
from halfbyte.formats import E2M1
from halfbyte.types import QuantizedTensor

SHARES = ("tensor", "expert")
FIRST_WITH_INF = 126
"""The smallest exponent under which a magnitude (4 or 6) exceeds float32."""
MONOTONE = ("optimal", "hybrid", "verbatim")
"""Algorithms that are lossless on a part of what they are lossless on."""


def cast_tensors(
    tensors: Sequence[QuantizedTensor], name: str, share: str, settings: Settings, out: QuantizedTensor | None = None
) -> tuple[list[QuantizedTensor], CastReport]:
    """Cast tensors that share their global scales, one for all or one per expert; a single one into `out` if given."""
    if out is None and (kept := keep_on_device(tensors, share, settings)) is not None:
        return [kept[0]], kept[1]
    if out is not None:
        room = _room(out, tensors, name)
        settings = replace(settings, out=room if share == "tensor" else None)
    for number, tensor in enumerate(tensors):
        called = name if len(tensors) == 1 else f"{name}[{number}]"
        rows = read(tensor, called)
        if settings.algorithm == "requantize":
            _check_finite(rows, tensor.shape, called)
    if share == "expert":
        _check_stacks(tensors, name)
    groups = grouped(tensors, share)
    casts = [cast_together(group, settings) for group in groups]
    if share == "tensor":
        results = [
            _like_source(assemble(tensor, *part, casts[0].scale), tensor)
            for tensor, part in zip(tensors, casts[0].parts, strict=True)
        ]
    else:
        results = [_stacked(tensor, [cast.parts[i] for cast in casts], casts) for i, tensor in enumerate(tensors)]
    if out is not None:
        results = [_into(out, results[0])]
    return results, _whole(tensors, groups, casts, share, settings)


def _check_finite(rows: Rows, shape: tuple[int, ...], name: str) -> None:
    """Refuse a tensor with an Inf: quantized again, it would be NaN everywhere."""
    if (rows.exponents or NO_BLOCKS).high < FIRST_WITH_INF:
        return
    with np.errstate(over="ignore"):
        values = E2M1.magnitudes[rows.largest] * power_of_two(rows.scales.astype(np.int32) - BIAS)
    blocks = np.argwhere(np.isinf(values))
    if len(blocks):
        raise InputError(
            f"{name} of shape {shape} decodes to Inf in {len(blocks)} blocks, the first in row {blocks[0][0]}; "
            "'requantize' would make the whole tensor NaN: take algorithm='optimal', which keeps Inf, or repair it"
        )


def _room(out: QuantizedTensor, tensors: Sequence[QuantizedTensor], name: str) -> tuple[U8, U8]:
    """The memory of `out` as matrices, after the checks."""
    if len(tensors) != 1:
        raise InputError(f"{name}: out takes one tensor, not a list of {len(tensors)}; cast them without out")
    (source,) = tensors
    if out.format != NVFP4 or out.shape != source.shape:
        raise InputError(
            f"{name}: out holds {out.format.name} of shape {out.shape}, but the result is nvfp4 of {source.shape}"
        )
    arrays = []
    for part in (out.codes, out.scales):
        array = to_numpy(part)
        on_cpu = not is_torch(part) or part.device.type == "cpu"
        if is_torch(part) != is_torch(source.codes) or not (
            on_cpu and array.flags.c_contiguous and array.flags.writeable
        ):
            raise InputError(f"{name}: out must be contiguous, writable, on the CPU, and of the source's kind of array")
        if any(np.shares_memory(array, to_numpy(given)) for given in (source.codes, source.scales)):
            raise InputError(f"{name}: out overlaps the source")
        arrays.append(array.reshape(-1, array.shape[-1]))
    return arrays[0], arrays[1]


def _into(out: QuantizedTensor, result: QuantizedTensor) -> QuantizedTensor:
    """The result in the memory of `out`; nothing is copied where it is there already."""
    for room, part in ((out.codes, result.codes), (out.scales, result.scales)):
        target, values = to_numpy(room), to_numpy(part)
        if not np.shares_memory(target, values):
            np.copyto(target, values)
    return replace(result, codes=out.codes, scales=out.scales)


def grouped(tensors: Sequence[QuantizedTensor], share: str) -> list[Sharers]:
    """The rows that share a scale: "tensor", "expert", or "alone" (one scale per expert and tensor)."""
    if share == "tensor":
        return [Sharers(tuple(_member(tensor, 0, _count(tensor)) for tensor in tensors))]
    experts = tensors[0].shape[0] if len(tensors[0].shape) > 2 else 1
    by_tensor = []
    for tensor in tensors:
        each = _count(tensor) // experts
        by_tensor.append([_member(tensor, i * each, (i + 1) * each) for i in range(experts)])
    if share == "alone":
        return [Sharers((member,)) for stack in by_tensor for member in stack]
    return [Sharers(members) for members in zip(*by_tensor, strict=True)]


def _member(tensor: QuantizedTensor, start: int, stop: int) -> Member:
    part = rows_of(tensor, start, stop)
    return Member(part, read(part, "tensor"))


def _count(tensor: QuantizedTensor) -> int:
    return int(np.prod(tensor.shape[:-1]))


def _check_stacks(tensors: Sequence[QuantizedTensor], name: str) -> None:
    for number, tensor in enumerate(tensors):
        if len(tensor.shape) < 3:
            raise InputError(
                f"{name}: share='expert' needs a stack (experts, rows, columns), but tensor {number} has shape "
                f"{tensor.shape}; use share='tensor'"
            )
        if tensor.shape[0] != tensors[0].shape[0]:
            raise InputError(
                f"{name}: partners need the same number of experts, not {tensors[0].shape[0]} and {tensor.shape[0]}"
            )


def _stacked(source: QuantizedTensor, parts: Sequence[tuple[object, object]], casts: Sequence[Cast]) -> QuantizedTensor:
    """The experts of one tensor put together; every row carries the global scale of its expert."""
    leading = source.shape[:-1]
    each = _count(source) // len(casts)

    def rows(values: list[np.float32]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        return np.repeat(np.array(values, np.float32), each).reshape(leading)

    whole = QuantizedTensor(
        format=NVFP4,
        shape=source.shape,
        codes=np.concatenate([np.asarray(codes) for codes, _ in parts]).reshape(*leading, -1),
        scales=np.concatenate([np.asarray(scales) for _, scales in parts]).reshape(*leading, -1),
        global_scale=rows([cast.scale.multiplier for cast in casts]),
        stored_scale=rows([cast.scale.stored for cast in casts]),
        contract=casts[0].scale.contract,
    )
    return _like_source(whole, source)


def _like_source(result: QuantizedTensor, source: QuantizedTensor) -> QuantizedTensor:
    """The result in the kind of array that the source has."""
    if isinstance(source.codes, np.ndarray):
        return result
    return QuantizedTensor(
        format=result.format,
        shape=result.shape,
        codes=like(np.asarray(result.codes), source.codes),
        scales=like(np.asarray(result.scales), source.codes),
        global_scale=like(np.asarray(result.global_scale), source.codes),
        stored_scale=like(np.asarray(result.stored_scale), source.codes),
        contract=result.contract,
    )


def _report(sharers: Sharers, cast: Cast, settings: Settings) -> CastReport:
    """The report of the rows under one global scale."""
    shapes = [member.tensor.shape for member in sharers.members]
    shape = shapes[0] if len(shapes) == 1 else (sum(shape[0] for shape in shapes), shapes[0][-1])
    return describe_scaled(cast.tally, shape, settings, sharers.exponents, [cast.scale], _bound([cast]))


def _bound(casts: Sequence[Cast]) -> float | None:
    """The bounds of all groups together; None if one has none."""
    bounds = [0.0 if cast.tally.label != "lossy" else cast.bound for cast in casts]
    known = [bound for bound in bounds if bound is not None]
    return sum(known) if len(known) == len(bounds) else None


def _whole(
    tensors: Sequence[QuantizedTensor],
    groups: Sequence[Sharers],
    casts: Sequence[Cast],
    share: str,
    settings: Settings,
) -> CastReport:
    """The report of everything given: sums over the groups, and what the other ways of sharing would cost."""
    total = add([cast.tally for cast in casts])
    shape = tensors[0].shape if len(tensors) == 1 else (sum(map(_count, tensors)), tensors[0].shape[-1])
    exponents = join(group.exponents for group in groups)
    report = describe_scaled(total, shape, settings, exponents, [cast.scale for cast in casts], _bound(casts))
    parts = [_report(group, cast, settings) for group, cast in zip(groups, casts, strict=True)]
    return replace(
        report,
        share=share,
        costs=_costs(tensors, share, total, len(casts), replace(settings, out=None)),
        parts=tuple(parts) if len(parts) > 1 else (),
    )


def _costs(
    tensors: Sequence[QuantizedTensor], share: str, total: Tally, groups: int, settings: Settings
) -> tuple[ShareCost, ...]:
    """Every way of sharing that these tensors have, the coarsest first. One way only: nothing to weigh."""
    stack = all(len(tensor.shape) > 2 and tensor.shape[0] == tensors[0].shape[0] for tensor in tensors)
    ways = ["tensor"] + ["expert"] * stack + ["alone"] * (len(tensors) > 1)
    if len(ways) == 1:
        return ()
    costs: list[ShareCost] = []
    for way in ways:
        if way == share:
            tally, scales = total, groups
        else:
            members = grouped(tensors, way)
            scales = len(members)
            if costs and costs[-1].lossless and settings.algorithm in MONOTONE:
                costs.append(replace(costs[-1], share=way, scales=scales))  # what fits all fits a part
                continue
            tally = add([cast_together(sharers, settings).tally for sharers in members])
        exact = tally.blocks - tally.requantized
        costs.append(ShareCost(way, scales, tally.label != "lossy", exact, tally.squared_error))
    return tuple(costs)
