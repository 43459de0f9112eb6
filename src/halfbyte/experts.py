"""quantize(scaling="expert"): one tensor scale per index of the first axis, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from halfbyte.arrays import Array, is_torch, to_numpy
from halfbyte.codec.pack import packed_width
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.foreign_arrays import needs_conversion, to_operand
from halfbyte.formats import BlockFormat, get_format
from halfbyte.request import Arguments
from halfbyte.types import QuantizedTensor


def by_expert(quantize: Callable[..., QuantizedTensor], x: Array, given: Arguments) -> QuantizedTensor:
    """Quantize each matrix of a 3-D tensor alone, into common arrays. `stored_scale` has shape (experts,)."""
    if needs_conversion(x) and not is_torch(x):
        x = to_operand(x)
    shape, out = tuple(x.shape), given.out
    wanted = check_experts(shape, given.format, given.block)
    if out is not None and not (isinstance(out, QuantizedTensor) and out.shape == shape and out.format == wanted):
        raise InputError(f"out does not hold {wanted.name} of shape {shape}, which the result is")
    amaxes = amax_of_each(given.global_amax, shape[0])
    if not shape[0]:
        return _of_no_experts(quantize(x, *given._replace(scaling="tensor", global_amax=None)))

    def one(index: int, into: QuantizedTensor | None) -> QuantizedTensor:
        return quantize(x[index], *given._replace(scaling="tensor", global_amax=amaxes[index], out=into))

    first = one(0, None)
    if first.contract.transform.columnwise:
        raise UnsupportedError(f"{first.contract} quantizes the transpose; give quantize() the matrices one by one")
    whole: QuantizedTensor = _room(first, shape) if out is None else out
    for room, made in ((whole.codes, first.codes), (whole.scales, first.scales)):
        target, value = cast("Any", room), cast("Any", made)
        target[0] = value
    each = [first, *(_into(one, index, whole[index]) for index in range(1, shape[0]))]
    stored = None if first.stored_scale is None else _stacked([q.stored_scale for q in each])
    multiplier = None if stored is None else _stacked([q.global_scale for q in each])
    return QuantizedTensor.trusted(
        first.format, shape, whole.codes, whole.scales, multiplier if stored is not None else first.global_scale,
        stored, first.contract, first.method,
    )  # fmt: skip


def _of_no_experts(q: QuantizedTensor) -> QuantizedTensor:
    """A tensor without experts has no scales either."""
    stored: Any = q.stored_scale
    return q if stored is None else replace(q, stored_scale=stored.reshape(1)[:0])


def _into(
    one: Callable[[int, QuantizedTensor | None], QuantizedTensor], index: int, room: QuantizedTensor
) -> QuantizedTensor:
    """One expert, written into its place; through a copy if the place is not aligned as a device needs it."""
    codes: Any = room.codes
    scales: Any = room.scales
    if is_torch(codes) and codes.is_cuda and codes.data_ptr() % 16:
        made = one(index, None)
        codes[...], scales[...] = cast("Any", made.codes), cast("Any", made.scales)
        return made
    return one(index, room)


def _room(q: QuantizedTensor, shape: tuple[int, ...]) -> QuantizedTensor:
    """Arrays for the codes and scales of all experts, of the kind that one has."""
    experts, rows, width = shape
    sizes = (experts, rows, packed_width(width, q.format)), (experts, rows, -(-width // q.format.block))
    like: Any = q.codes
    codes, scales = (like.new_empty(size) if is_torch(like) else np.empty(size, np.uint8) for size in sizes)
    return QuantizedTensor.trusted(q.format, shape, codes, scales, None, None, q.contract, q.method)


def _stacked(numbers: list[Any]) -> Array:
    if is_torch(numbers[0]):
        import torch

        return torch.stack([number.reshape(()) for number in numbers])
    return np.array([np.float32(to_numpy(np.asarray(number)).reshape(-1)[0]) for number in numbers], np.float32)


def check_experts(shape: tuple[int, ...], format: str | BlockFormat, block: int | None) -> BlockFormat:
    """Raise if a tensor cannot have one scale per expert; else its format."""
    if len(shape) != 3:
        raise InputError(f"scaling='expert' takes a tensor of shape (experts, rows, columns), not {shape}")
    wanted = get_format(format, block)
    if not wanted.has_global:
        raise UnsupportedError(f"{wanted.name} has no global scale; leave scaling='expert' out")
    return wanted


def amax_of_each(given: Any, experts: int) -> list[Any]:
    """The amax of each expert: None, one for all, or one each."""
    if given is None or (not getattr(given, "shape", ()) and not isinstance(given, list | tuple)):
        return [given] * experts
    if len(getattr(given, "shape", (1,))) != 1:
        raise InputError(
            f"global_amax has shape {tuple(given.shape)}, but scaling='expert' needs one number per expert"
        )
    if len(given) != experts:
        raise InputError(f"global_amax has {len(given)} values, but scaling='expert' needs one, or {experts}")
    return [float(one) if isinstance(one, int | float | np.generic) else one for one in given]
