"""Names, dtypes and shapes of quantized weights against the tables of their layouts: what can be told from headers."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.errors import CheckpointError
from halfbyte.models.names import is_row_parallel
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents, StoredTensors


def structure_problems(contents: Contents) -> Iterator[Problem]:
    """Missing and stray parts, dtypes no reader accepts, shapes that do not belong together."""
    for weight in contents.quantized.values():
        yield from _weight(weight)
    yield from _splits(contents)
    for name, tensor in contents.stray.items():
        text = f"{tensor.dtype} {list(tensor.shape)} belongs to no weight; readers drop it or stop"
        yield Problem("error", "stray-tensor", name, text)
    for name, tensor in contents.plain.items():
        if tensor.dtype in ("F8_E4M3", "U8", "I8") and name.endswith(".weight"):
            text = f"{tensor.dtype} {list(tensor.shape)} has no scale beside it: its values cannot be known"
            yield Problem("error", "missing-part", name, text)


def _weight(weight: StoredTensors) -> Iterator[Problem]:
    storage = weight.storage
    for name in weight.missing:
        text = f"stored as {storage.name}, but there is no tensor {name}"
        yield Problem("error", "missing-part", weight.name, text)
    for role, part in weight.parts.items():
        rule = storage.rules[role]
        if part.dtype not in rule.dtypes:
            text = f"{part.dtype}, but readers of {storage.name} expect {' or '.join(rule.dtypes)}"
            yield Problem("error", "dtype", part.name, text)
        if rule.shape in ((), (1,)) and part.shape not in ((), (1,)):
            yield Problem("error", "shape", part.name, f"shape {list(part.shape)}: one number is expected")
        if rule.refusal:
            yield Problem("error", "shape", weight.name, f"{part.name}: {rule.refusal}")
    if "scales" in weight.parts:
        yield from _shapes(weight)


def _shapes(weight: StoredTensors) -> Iterator[Problem]:
    """Codes and scales whose shapes do not belong together."""
    storage, codes, scales = weight.storage, weight.codes.shape, weight.parts["scales"].shape
    rule = storage.rules["scales"]
    sizes = storage.sizes(codes)
    if sizes is None or 0 in (*codes, *scales):
        wanted = f"has codes {storage.describe(storage.codes)}"
    elif not callable(rule.shape):
        if storage.shape_of(rule, *sizes) == scales:
            return
        wanted = f"has codes {storage.describe(storage.codes)} and scales {storage.describe(rule)}"
    else:
        try:
            rule.shape(sizes[1], sizes[2], scales)
            return
        except CheckpointError as error:
            wanted = str(error)
    text = f"codes {list(codes)} with scales {list(scales)}: {storage.name} {wanted}"
    yield Problem("error", "shape", weight.name, text)


def _splits(contents: Contents) -> Iterator[Problem]:
    """Row-parallel layers are cut along their width; a cut within a block is refused by servers."""
    narrow = []
    for weight in contents.quantized.values():
        block = weight.storage.block
        if is_row_parallel(weight.name) and block and not weight.storage.stacked and weight.codes.shape:
            width = weight.storage.packing * weight.codes.shape[-1]
            if width % (8 * block):
                narrow.append((weight.name, width, block))
    if narrow:
        name, width, block = narrow[0]
        text = f"width {width} is not 8 whole parts of {block}-element blocks: tensor parallelism of 8 will be refused"
        more = f" ({len(narrow) - 1} more like it)" if len(narrow) > 1 else ""
        yield Problem("warning", "tensor-parallel", name, text + more)
