"""gpt-oss' layout: MXFP4 experts as blocks and scales, one tensor for all experts of a layer; all else unquantized."""

from __future__ import annotations

from typing import Any

from halfbyte.layouts.description import Claim, Json, Layout, PartRule, Setting, Storage

KEPT = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
"""What the released checkpoints list. Readers take every linear layer outside the experts as unquantized anyway."""

STACK = Storage(
    name="mxfp4 (gpt-oss)",
    layout="gpt-oss",
    format="mxfp4",
    block=32,
    parts=(
        PartRule("codes", "_blocks", ("U8",), ("experts", "rows", "blocks", "block_bytes")),
        PartRule("scales", "_scales", ("U8",), ("experts", "rows", "blocks")),
    ),
)


def write_config(setting: Setting) -> dict[str, Any]:
    return {"quant_method": "mxfp4", "modules_to_not_convert": list(KEPT)}


def read_config(config: Json) -> Claim:
    return Claim("gpt-oss", False, formats=("mxfp4",))


LAYOUT = Layout(
    name="gpt-oss",
    quant_method="mxfp4",
    storages=(STACK,),
    write_config=write_config,
    read_config=read_config,
    stacks="always",
    stacking="interleaved",
)
