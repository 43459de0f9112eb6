"""Where bytes sit in a file. A layout reorders and names; it computes nothing."""

from __future__ import annotations

from halfbyte.errors import unknown_name
from halfbyte.layouts.compressed_tensors import CompressedTensors
from halfbyte.layouts.description import Layout
from halfbyte.layouts.gpt_oss import GptOss
from halfbyte.layouts.modelopt import DeepSeekV4, ModelOpt

LAYOUTS: dict[str, Layout] = {
    layout.name: layout for layout in (ModelOpt(), CompressedTensors(), GptOss(), DeepSeekV4())
}


def get_layout(name: str) -> Layout:
    """The layout of that name, or an error that lists the names there are."""
    if name not in LAYOUTS:
        raise unknown_name("layout", name, LAYOUTS)
    return LAYOUTS[name]
