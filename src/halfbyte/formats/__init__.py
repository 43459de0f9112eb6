"""The table of block formats. To add a format, write a file with one literal and add a line here."""

from __future__ import annotations

import contextlib
import dataclasses
import operator

from halfbyte.errors import UnsupportedError, unknown_name
from halfbyte.formats.elements import E2M1, E4M3, E8M0, ELEMENTS
from halfbyte.formats.mxfp4 import MXFP4
from halfbyte.formats.mxfp8 import MXFP8
from halfbyte.formats.nvfp4 import NVFP4
from halfbyte.formats.spec import BlockFormat, ElementFormat

FORMATS: dict[str, BlockFormat] = {format.name: format for format in (NVFP4, MXFP4, MXFP8)}

__all__ = ["E2M1", "E4M3", "E8M0", "ELEMENTS", "FORMATS", "BlockFormat", "ElementFormat", "get_format"]


def get_format(name: str | BlockFormat, block: int | None = None) -> BlockFormat:
    """Return the block format of a name, with the given block length (None: the format's default length).

    >>> get_format("nvfp4").block
    16
    >>> get_format("nvfp4", block=32).bits_per_element
    4.25
    """
    if isinstance(name, BlockFormat):
        format = name
    elif isinstance(name, str) and name in FORMATS:
        format = FORMATS[name]
    else:
        raise unknown_name("format", name, FORMATS)
    if block is None:
        return format
    with contextlib.suppress(TypeError):  # a numpy integer is a whole number too
        block = operator.index(block)
    if type(block) is int and block == format.block:
        return format
    allowed = " or ".join(map(str, format.blocks))
    if type(block) is not int:
        raise UnsupportedError(f"block is a whole number, {allowed} for {format.name}, not {block!r}")
    if block not in format.blocks:
        raise UnsupportedError(f"{format.name} has blocks of {allowed}, not {block}")
    return dataclasses.replace(format, block=block)
