"""Scales of an FP8 cache of keys and values in a plan: copied under the names that the target's readers want."""

from __future__ import annotations

from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.layouts.description import Part, asks_for_fp8_cache
from halfbyte.layouts.kv_cache import move_cache_scales


def place_cache_scales(draft: Draft) -> None:
    """Give cache scales their new names, drop those without a place, and note what the user should know.

    Only a quantized source has such scales: in any other, a tensor of that name is the model's own.
    """
    source = draft.checkpoint.quantization
    if not source:
        return
    used = {*draft.owned, *draft.dropped}
    free = {name: tensor for name, tensor in draft.checkpoint.tensors.items() if name not in used}
    target = draft.target.layout.name if draft.target.format is not None else None
    moves = move_cache_scales({name: tensor.shape for name, tensor in free.items()}, target)
    draft.dropped |= moves.dropped
    for name, place in moves.moved.items():
        draft.moved[name] = Part(place.name, free[name].dtype, place.shape, "values")
    renamed = [name for name, place in moves.moved.items() if place.name != name]
    if renamed:
        first = renamed[0]
        draft.notes.append(
            f"{len(renamed)} scales of the FP8 cache get the names that readers of {target} want: {first} becomes "
            f"{moves.moved[first].name}"
        )
    if moves.unknown:
        draft.notes.append(
            f"{len(moves.unknown)} tensors of a quantized cache, {moves.unknown[0]} first, are in no form known "
            f"for {target}: copied under their own names"
        )
    if moves.moved and not asks_for_fp8_cache(source):
        draft.notes.append(
            f"{len(moves.moved)} scales of a quantized cache are copied, but the source asks for no FP8 cache: "
            "readers leave them out unless told otherwise"
        )
