"""Quark's MXFP4, read only: weight (packed) and weight_scale, both uint8."""

from __future__ import annotations

from halfbyte.layouts.description import Claim, Json, Layout, PartRule, Storage

MXFP4 = Storage(
    name="mxfp4 (quark)",
    layout="quark",
    format="mxfp4",
    block=32,
    parts=(
        PartRule("codes", ".weight", ("U8", "I8"), ("rows", "packed")),
        PartRule("scales", ".weight_scale", ("U8", "F8_E8M0"), ("rows", "blocks"), tells="dtype"),
    ),
    without=(".weight_scale_2",),
)


def read_config(config: Json) -> Claim:
    return Claim("quark", False, beside=("fp8", "deepseek"))


LAYOUT = Layout(name="quark", quant_method="quark", read_only=(MXFP4,), read_config=read_config)
