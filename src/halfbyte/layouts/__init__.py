"""Where bytes sit in a file. A layout reorders and names; it computes nothing.

One file per layout; `storage` finds which one a set of tensors has, `exclude` and `matching` know how readers match
exclude lists, `swizzle` and `gguf` reorder bytes.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from halfbyte.errors import unknown_name
from halfbyte.layouts import compressed_tensors, deepseek_v4, fp8, gpt_oss, modelopt, quark
from halfbyte.layouts.description import Layout

if TYPE_CHECKING:
    from halfbyte.layouts.readers import (
        from_compressed_tensors,
        from_deepseek_v4,
        from_gpt_oss,
        from_modelopt,
    )

__all__ = [
    "LAYOUTS",
    "from_compressed_tensors",
    "from_deepseek_v4",
    "from_gpt_oss",
    "from_modelopt",
    "get_layout",
    "writable_layouts",
]

READERS = ("from_compressed_tensors", "from_deepseek_v4", "from_gpt_oss", "from_modelopt")
"""Functions of `layouts.readers` that are found here too. They are loaded when used."""

LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        modelopt.LAYOUT,
        compressed_tensors.LAYOUT,
        gpt_oss.LAYOUT,
        deepseek_v4.LAYOUT,
        fp8.LAYOUT,
        quark.LAYOUT,
    )
}


def writable_layouts() -> dict[str, Layout]:
    """The layouts that can be written."""
    return {name: layout for name, layout in LAYOUTS.items() if layout.write_config is not None}


def get_layout(name: str) -> Layout:
    """The layout of that name to write, or an error that lists the names there are."""
    known = writable_layouts()
    if name not in known:
        raise unknown_name("layout", name, known)
    return known[name]


def __getattr__(name: str) -> object:
    """The readers, and the modules of the layouts."""
    if name in READERS:
        found: object = getattr(importlib.import_module("halfbyte.layouts.readers"), name)
        return found
    if name in ("gguf", "readers", "storage", "swizzle"):
        return importlib.import_module(f"halfbyte.layouts.{name}")
    raise AttributeError(f"module 'halfbyte.layouts' has no attribute {name!r}")
