"""DeepSeek-V4: FP8 everywhere but in the routed experts, which are MXFP4 (int8 codes) as released.

Converted, its experts have Model-Optimizer's tensors and the rest of the checkpoint stays FP8.
"""

from __future__ import annotations

from typing import Any

from halfbyte.layouts import modelopt
from halfbyte.layouts.description import Claim, Json, Layout, PartRule, Setting, Storage

MXFP4 = Storage(
    name="mxfp4 (deepseek)",
    layout="deepseek",
    format="mxfp4",
    block=32,
    parts=(
        PartRule("codes", ".weight", ("I8", "U8"), ("rows", "packed")),
        PartRule("scales", ".scale", ("F8_E8M0", "U8"), ("rows", "blocks"), tells="dtype"),
    ),
)


def write_config(setting: Setting) -> dict[str, Any]:
    return {
        **setting.source,
        "moe_quant_algo": "NVFP4",
        "quantized_layers": {
            module: {"quant_algo": modelopt.algorithm(setting), "group_size": setting.format.block}
            for module in setting.quantized
        },
        "ignore": list(setting.excluded),
    }


def read_config(config: Json) -> Claim | None:
    """vLLM builds such experts with quantized activations, whatever quantized_layers says of each."""
    if not config.get("moe_quant_algo"):
        return None
    layers = config.get("quantized_layers")
    named = tuple(layers) if isinstance(layers, dict) else None
    return Claim("modelopt", True, formats=("nvfp4",), layers=named, beside=("fp8", "deepseek"))


LAYOUT = Layout(
    name="deepseek-v4",
    quant_method="fp8",
    storages=(modelopt.MATRIX,),
    read_only=(MXFP4,),
    write_config=write_config,
    extra_files=modelopt.extra_files,
    read_config=read_config,
    needs_input_scales=True,
    replaces="modelopt",
)
