"""Names, dtypes and shapes of quantized weights: what can be told from headers."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.checkpoint.io.decode import block_length, fp8_grid
from halfbyte.errors import CheckpointError
from halfbyte.models.names import is_row_parallel
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import GPT_OSS, Kind, Weight, Weights


def structure_problems(weights: Weights) -> Iterator[Problem]:
    """Missing and stray parts, dtypes no reader accepts, shapes that do not belong together."""
    for weight in weights.quantized.values():
        yield from _weight(weight)
    yield from _splits(weights)
    for name, tensor in weights.stray.items():
        text = f"{tensor.info.dtype} {list(tensor.info.shape)} belongs to no weight; readers drop it or stop"
        yield Problem("error", "stray-tensor", name, text)
    for name, tensor in weights.plain.items():
        if tensor.info.dtype in ("F8_E4M3", "U8", "I8") and name.endswith(".weight"):
            text = f"{tensor.info.dtype} {list(tensor.info.shape)} has no scale beside it: its values cannot be known"
            yield Problem("error", "missing-part", name, text)


def _weight(weight: Weight) -> Iterator[Problem]:
    kind = weight.kind
    for role in kind.required:
        if role not in weight.parts:
            text = f"stored as {kind.name}, but there is no tensor {weight.name}{kind.suffixes[role]}"
            yield Problem("error", "missing-part", weight.name, text)
    for role, part in weight.parts.items():
        accepted = kind.dtypes[role]
        if part.info.dtype not in accepted:
            text = f"{part.info.dtype}, but readers of {kind.name} expect {' or '.join(accepted)}"
            yield Problem("error", "dtype", part.name, text)
    for role in ("global", "input"):
        if role in weight.parts and weight.parts[role].info.shape not in ((), (1,)):
            shape = list(weight.parts[role].info.shape)
            yield Problem("error", "shape", weight.parts[role].name, f"shape {shape}: one number is expected")
    if "codes" in weight.parts and "scales" in weight.parts:
        yield from _shapes(weight, kind)


def _shapes(weight: Weight, kind: Kind) -> Iterator[Problem]:
    codes, scales = weight.parts["codes"].info.shape, weight.parts["scales"].info.shape
    if kind.format == "int4":
        fits = len(codes) == len(scales) == 2 and scales[0] == codes[0] and 0 not in (*codes, *scales)
        fits = fits and codes[1] * 8 % scales[1] == 0 and not {"zeros", "order"} & set(weight.parts)
        wanted = "codes [out, in/8] and scales [out, groups] here; zero points and permuted groups are not read"
    elif kind.format == "fp8":
        fits = len(codes) == 2 and _grid_fits((codes[0], codes[1]), scales)
        wanted = "one scale a tensor, a row or column of codes [out, in], or a block such as 128 × 128"
    elif kind is GPT_OSS:
        fits = len(codes) == 4 and codes[3] == 16 and scales == codes[:3]
        wanted = "codes [experts, rows, blocks, 16] and scales [experts, rows, blocks]"
    elif kind.stack:  # transposed on disk: the packed axis is the middle one
        fits = len(codes) == 3 and scales == (codes[0], codes[1] * 2 // kind.block, codes[2])
        fits = fits and codes[1] * 2 % kind.block == 0
        wanted = f"codes [experts, in/2, out] and scales [experts, in/{kind.block}, out]"
    else:
        fits = len(codes) == 2 and codes[1] * 2 % kind.block == 0 and scales == (codes[0], codes[1] * 2 // kind.block)
        wanted = f"codes [out, in/2] and scales [out, in/{kind.block}]"
    if not fits:
        text = f"codes {list(codes)} with scales {list(scales)}: {kind.name} has {wanted}"
        yield Problem("error", "shape", weight.name, text)


def _grid_fits(codes: tuple[int, int], scales: tuple[int, ...]) -> bool:
    try:
        return all(block_length(size, count) > 0 for size, count in zip(codes, fp8_grid(scales), strict=True))
    except CheckpointError:
        return False


def _splits(weights: Weights) -> Iterator[Problem]:
    """Row-parallel layers are cut along their width; a cut within a block is refused by servers."""
    narrow = []
    for weight in weights.quantized.values():
        if is_row_parallel(weight.name) and "codes" in weight.parts and weight.kind.block and not weight.kind.stack:
            width = 2 * weight.parts["codes"].info.shape[-1]
            if width % (8 * weight.kind.block):
                narrow.append((weight.name, width, weight.kind.block))
    if narrow:
        name, width, block = narrow[0]
        text = f"width {width} is not 8 whole parts of {block}-element blocks: tensor parallelism of 8 will be refused"
        more = f" ({len(narrow) - 1} more like it)" if len(narrow) > 1 else ""
        yield Problem("warning", "tensor-parallel", name, text + more)
