"""Where bytes sit in a file. A layout reorders and names; it computes nothing.

One file per layout; `storage` finds which one a set of tensors has, `exclude` and `matching` know how readers match
exclude lists, `swizzle` and `gguf` reorder bytes.
"""

from __future__ import annotations

from halfbyte.errors import unknown_name
from halfbyte.layouts import compressed_tensors, deepseek_v4, fp8, gpt_oss, modelopt, quark
from halfbyte.layouts.description import Layout

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
