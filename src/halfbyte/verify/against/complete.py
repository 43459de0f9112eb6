"""Every tensor of the source is in the checkpoint in some form, and the checkpoint has none that the source lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.layouts.description import asks_for_fp8_cache
from halfbyte.layouts.kv_cache import CacheScale, cache_scale, is_cache_tensor
from halfbyte.layouts.storage import unneeded_suffixes
from halfbyte.models import model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import StoredTensors
from halfbyte.verify.values import Matrix


def completeness(
    checkpoint: Checkpoint,
    ours: dict[str, Matrix],
    unread: Sequence[StoredTensors],
    source: Checkpoint,
    theirs: dict[str, Matrix],
    biases: dict[str, tuple[str, int, slice]],
) -> Iterator[Problem]:
    """Source tensors that the checkpoint lacks, and weights that the source does not have."""
    names = {weight.name for weight in unread}
    stacks = tuple(f"{weight.parent}." for weight in unread if weight.storage.stacked)
    for name in theirs:
        if name in ours or name in names or name.startswith(stacks):
            continue
        text = f"in the source ({theirs[name].kind} {list(theirs[name].shape)}), but not in the checkpoint"
        yield Problem("error", "lost", name, text)
    unneeded = unneeded_suffixes()
    cached, cached_before = cache_scales(checkpoint), cache_scales(source)
    covered = {tensor for matrix in theirs.values() for tensor in matrix.sources}
    for name, tensor in source.tensors.items():
        if name in covered or name in checkpoint.tensors or name.endswith(unneeded):
            continue
        if any(origin == name for origin, _, _ in biases.values()):
            continue
        if is_cache_tensor(name) and (cache_scale(name) in cached or not asks_for_fp8_cache(checkpoint.quantization)):
            continue
        text = f"in the source ({tensor.info.dtype} {list(tensor.info.shape)}), but not in the checkpoint"
        yield Problem("error", "lost", name, text)
    for name, matrix in ours.items():
        if name not in theirs:
            yield Problem(
                "error", "no-source", name, f"{matrix.kind} {list(matrix.shape)}, but the source has no such weight"
            )
    stored = {tensor for matrix in ours.values() for tensor in matrix.sources}
    stored |= {part.name for weight in unread for part in weight.parts.values()}
    for name, tensor in checkpoint.tensors.items():
        if name not in stored and name not in source.tensors and name not in biases:
            if cache_scale(name) in cached_before:
                continue
            text = f"{tensor.info.dtype} {list(tensor.info.shape)}, but the source has no such tensor"
            yield Problem("error", "no-source", name, text)


def cache_scales(checkpoint: Checkpoint) -> dict[CacheScale | None, Tensor]:
    """The scales of a quantized cache, whatever the layout names them."""
    found = {cache_scale(name): tensor for name, tensor in checkpoint.tensors.items()}
    return {scale: tensor for scale, tensor in found.items() if scale is not None}


def split_biases(checkpoint: Checkpoint, source: Checkpoint) -> dict[str, tuple[str, int, slice]]:
    """Biases of experts that were one tensor: name → source tensor, expert, which of its elements."""
    model = model_of(source.config)
    found: dict[str, tuple[str, int, slice]] = {}
    for name, tensor in source.tensors.items():
        stack = name.removesuffix("_bias")
        if stack == name or not is_stack(stack) or len(tensor.shape) != 2:
            continue
        for expert in range(tensor.shape[0]):
            for projection, elements in model.projections(stack, tensor.shape[1]).items():
                bias = f"{expert_module(stack, expert, projection)}.bias"
                if bias in checkpoint.tensors:
                    found[bias] = (name, expert, elements)
    return found
