"""GGUF block order, both ways: half-split nibbles, scales in front of the codes.

The functions take numpy arrays or torch tensors, and give the same kind on the same device; a GPU's are copied.

| type | elements | bytes |
|---|---|---|
| MXFP4 | 32 | 1 scale, then 16 code bytes: byte j holds elements j (low nibble) and j+16 |
| NVFP4 | 64 | 4 scales (one for each 16), then 4x8 code bytes: byte j of a 16-group holds elements j and j+8 |
"""

from __future__ import annotations

import numpy as np

from halfbyte.arrays import of_either_kind
from halfbyte.codec.bits import U8
from halfbyte.codec.pack import pack, unpack
from halfbyte.errors import InputError, unknown_name
from halfbyte.formats import BlockFormat

GROUPS = {"mxfp4": 1, "nvfp4": 4}
"""Blocks of the format that share one GGUF block."""


@of_either_kind
def half_split(codes: U8, format: BlockFormat) -> U8:
    """Packed codes with even-odd nibbles (rows, K/2) as half-split nibbles of the same size."""
    rows, width = _whole_blocks("codes", codes, format.block // 2)
    elements = unpack(codes, 2 * width, format).reshape(rows, -1, 2, format.block // 2)
    halves: U8 = elements[:, :, 0] | (elements[:, :, 1] << np.uint8(4))
    return halves.reshape(rows, width)


@of_either_kind
def even_odd(halves: U8, format: BlockFormat) -> U8:
    """The inverse of `half_split`."""
    rows, width = _whole_blocks("codes", halves, format.block // 2)
    blocks = halves.reshape(rows, -1, format.block // 2)
    return pack(np.concatenate([blocks & 0xF, blocks >> 4], axis=-1).reshape(rows, 2 * width), format)


@of_either_kind
def to_blocks(codes: U8, scales: U8, format: BlockFormat) -> U8:
    """(rows, K/2) codes and (rows, K/block) scales as rows of GGUF blocks."""
    group = _group(format)
    rows, width = _whole_blocks("codes", codes, format.block // 2)
    if scales.shape != (rows, 2 * width // format.block):
        raise InputError(
            f"codes of shape {codes.shape} need scales of shape {(rows, 2 * width // format.block)}, not {scales.shape}"
        )
    if scales.shape[1] % group:
        raise InputError(f"a GGUF row of {format.name} is a multiple of {group * format.block} elements")
    parts = [
        scales.reshape(rows, -1, group),
        half_split(codes, format).reshape(rows, -1, group * format.block // 2),
    ]
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


@of_either_kind
def from_blocks(blocks: U8, format: BlockFormat) -> tuple[U8, U8]:
    """Rows of GGUF blocks as (codes, scales): the inverse of `to_blocks`."""
    group = _group(format)
    size = group + group * format.block // 2
    rows, _ = _whole_blocks(f"GGUF blocks of {format.name}", blocks, size)
    split = blocks.reshape(rows, -1, size)
    halves = np.ascontiguousarray(split[..., group:]).reshape(rows, -1)
    return even_odd(halves, format), np.ascontiguousarray(split[..., :group]).reshape(rows, -1)


def _group(format: BlockFormat) -> int:
    if format.name not in GROUPS:
        raise unknown_name("format of GGUF", format.name, GROUPS)
    return GROUPS[format.name]


def _whole_blocks(what: str, array: U8, size: int) -> tuple[int, int]:
    """Rows and bytes per row of a matrix whose rows are whole blocks of that many bytes."""
    if array.ndim != 2 or array.shape[1] % size:
        raise InputError(
            f"{what} of shape {array.shape}: expected (rows, bytes) with a multiple of {size} bytes per row"
        )
    return array.shape[0], array.shape[1]
