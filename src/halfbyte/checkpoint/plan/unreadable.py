"""Matrices of a dtype that cannot be converted (F64, integers, E5M2, codes without scales): kept, or an error that says
what to do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from halfbyte.checkpoint.io.index import Tensor
from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import FLOATS
from halfbyte.layouts.storage import all_storages

OTHER_FLOATS = ("F64", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F6_E2M3", "F6_E3M2", "F4")


def keep_unreadable(
    unreadable: Mapping[str, Tensor], reason: Callable[[str, int], str | None], quantized_source: bool
) -> dict[str, str]:
    """Module → why it is kept, for matrices that can only be copied as they are.

    reason: why the caller or the model keeps a module of that width; None where it would be converted, which is an
    error here. In a source that is quantized, a matrix that is none of its formats was left out of it on purpose.
    """
    kept: dict[str, str] = {}
    refused: list[str] = []
    for module, tensor in unreadable.items():
        found = reason(module, tensor.shape[-1])
        if found is None and quantized_source and not _possible_scales(tensor):
            found = "unquantized in the source"
        if found is None:
            refused.append(module)
        else:
            kept[module] = found
    if refused:
        others = f". {len(refused) - 1} more are like it: {', '.join(refused[1:])}" if len(refused) > 1 else ""
        raise CheckpointError(unreadable_text(unreadable[refused[0]], refused[0]) + others)
    return kept


def unreadable_text(tensor: Tensor, module: str = "") -> str:
    """The message for a tensor that is named like a weight, but fits no table of a layout.

    module: whose weight it is, if it could be kept as it is.
    """
    scales = _possible_scales(tensor)
    keep = f"copy it as it is with --keep {module}"
    if scales:
        text = f"{tensor.name} is quantized ({tensor.dtype}), but none of its possible scales is there: "
        return text + ", ".join(scales) + (f"; fetch what is missing, or {keep}" if module else "")
    known = ", ".join(sorted(storage.name for storage in all_storages()))
    text = f"{tensor.name}: {tensor.dtype} of shape {list(tensor.shape)} is a weight in a form that no reader knows. "
    if module and tensor.dtype in OTHER_FLOATS:
        text += f"Save it as BF16 or F32 first, or {keep}. "
    elif module:
        text += f"Integers are no linear layer: {keep}. "
    return text + f"Known: {', '.join(FLOATS)}, {known}"


def _possible_scales(tensor: Tensor) -> list[str]:
    """Names of the scales of which a tensor would need one, if its dtype is that of a layout's codes."""
    needed = {
        tensor.name.removesuffix(storage.codes.suffix) + storage.rules["scales"].suffix
        for storage in all_storages()
        if storage.codes.suffix and tensor.name.endswith(storage.codes.suffix) and tensor.dtype in storage.codes.dtypes
    }
    return sorted(needed)
