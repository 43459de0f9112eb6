"""Block scales, byte by byte: none may be NaN or negative, and none 0 where codes are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from halfbyte.checkpoint.execute.manifest import read_manifest
from halfbyte.verify.parallel import InOrder, in_order
from halfbyte.verify.problems import Problem
from halfbyte.verify.reading import read_pieces
from halfbyte.verify.stored import Contents, StoredTensors
from halfbyte.verify.values import coded_rows

ZERO_SCALES = ("miles", "transformer_engine")
"""Contracts by whose rules the scale of a block too small for E4M3 is 0."""


ROWS = 256
"""Rows of codes that are looked at together."""


def block_problems(path: Path, contents: Contents, each: InOrder = in_order) -> Iterator[Problem]:
    """Counts of bad scale bytes, one problem per weight and kind of badness."""
    manifest = read_manifest(path) or {}
    zeros_expected = str(manifest.get("contract")).startswith(ZERO_SCALES)
    coded = (
        weight
        for weight in contents.quantized.values()
        if weight.storage.format in ("nvfp4", "mxfp4") and {"codes", "scales"} <= set(weight.parts)
    )
    for problems in each(lambda weight: list(_weight(path, weight, zeros_expected)), coded):
        yield from problems


def _weight(path: Path, weight: StoredTensors, zeros_expected: bool) -> Iterator[Problem]:
    total, name = weight.parts["scales"].info.bytes, weight.parts["scales"].name
    e4m3 = weight.storage.format == "nvfp4"
    nan = negative = zero = 0
    for piece in read_pieces(path, weight.parts["scales"]):
        part = piece.view(np.uint8)
        if e4m3:
            nan += int(np.count_nonzero((part & 0x7F) == 0x7F))
            negative += int(np.count_nonzero(part > 0x80)) - int(np.count_nonzero(part == 0xFF))
            zero += int(np.count_nonzero((part & 0x7F) == 0))
        else:
            nan += int(np.count_nonzero(part == 0xFF))
    if nan:
        yield Problem("error", "block-scale", name, f"{nan} of {total} scales are NaN: their blocks decode to NaN")
    if negative:
        yield Problem("error", "block-scale", name, f"{negative} of {total} scales are negative")
    if zero:
        lost = _lost_blocks(path, weight)
        if lost and not zeros_expected:
            text = f"{zero} of {total} scales are 0, {lost} of them over codes that are not: those values are lost"
            yield Problem("error", "block-scale", name, text)
        else:
            why = "as its contract writes them" if zeros_expected else "over zero codes"
            text = f"{zero} of {total} scales are 0 ({why}); Model-Optimizer's rule is never to write 0"
            yield Problem("warning", "block-scale", name, text)


def _lost_blocks(path: Path, weight: StoredTensors) -> int:
    """Blocks with a zero scale whose codes are not all ±0."""
    packed = weight.storage.block // weight.storage.packing
    experts, count, _ = weight.storage.sizes(weight.codes.shape) or (0, 0, 0)
    lost = 0
    for expert in range(experts or 1):
        for start in range(0, count, ROWS):
            rows = slice(start, start + ROWS)
            zero = (coded_rows(path, weight, "scales", expert, rows).view(np.uint8) & 0x7F) == 0
            if zero.any():
                codes = np.ascontiguousarray(coded_rows(path, weight, "codes", expert, rows))
                blocks = codes.view(np.uint8).reshape(*zero.shape, packed)
                lost += int((blocks[zero] & 0x77).any(axis=1).sum())
    return lost
