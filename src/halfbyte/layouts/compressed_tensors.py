"""compressed-tensors' layout: weight_packed, weight_scale and, for NVFP4, weight_global_scale, which divides.

transformers, vLLM and SGLang read it. MXFP4 scales are uint8; there is no tensor scale. Experts are one module each.
Its symmetric INT4 (eight codes per int32, the lowest bits first) is read, not written.
"""

from __future__ import annotations

from typing import Any

from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import FLOATS, Claim, Json, Layout, PartRule, Reader, Setting, Storage, texts
from halfbyte.layouts.matching import compressed_tensors
from halfbyte.layouts.modelopt import AWQ

VERSION = "0.20.0"

CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
"""An FP8 cache of keys and values with one scale per layer."""

GROUPS = (32, 64, 128)
"""Lengths of INT4 groups; or one group per row."""


def int4_grid(rows: int, columns: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many INT4 scales lie along the two axes: one per row and group."""
    if len(shape) != 2 or shape[0] != rows:
        raise CheckpointError(f"they are no scales of {rows} rows: codes are [out, in/8], scales [out, groups]")
    if not shape[1] or columns % shape[1] or columns // shape[1] not in (*GROUPS, columns):
        raise CheckpointError(f"{shape[1]} scales per row do not fit {columns} elements: groups of 32, 64 or 128")
    return shape[0], shape[1]


UNREAD_INT4 = "INT4 with zero points or permuted groups is not read"

NVFP4 = Storage(
    name="nvfp4 (compressed-tensors)",
    layout="compressed-tensors",
    format="nvfp4",
    block=16,
    parts=(
        PartRule("codes", ".weight_packed", ("U8",), ("rows", "packed")),
        PartRule("scales", ".weight_scale", ("F8_E4M3",), ("rows", "blocks")),
        PartRule("divisor", ".weight_global_scale", ("F32",), (1,)),
        PartRule("input_divisor", ".input_global_scale", ("F32",), (1,), optional=True),
        PartRule("prescale", ".pre_quant_scale", FLOATS, ("columns",), optional=True, refusal=AWQ),
    ),
)
MXFP4 = Storage(
    name="mxfp4 (compressed-tensors)",
    layout="compressed-tensors",
    format="mxfp4",
    block=32,
    parts=(
        PartRule("codes", ".weight_packed", ("U8",), ("rows", "packed")),
        PartRule("scales", ".weight_scale", ("U8",), ("rows", "blocks"), tells="dtype"),
    ),
    without=(".weight_global_scale",),
)
INT4 = Storage(
    name="int4 (compressed-tensors)",
    layout="compressed-tensors",
    format="int4",
    packing=8,
    parts=(
        PartRule("codes", ".weight_packed", ("I32",), ("rows", "packed")),
        PartRule("scales", ".weight_scale", FLOATS, int4_grid),
        PartRule("shape", ".weight_shape", ("I64", "I32"), (2,), optional=True),
        PartRule("zero_points", ".weight_zero_point", ("I32", "I8"), int4_grid, optional=True, refusal=UNREAD_INT4),
        PartRule("order", ".weight_g_idx", ("I32", "I64"), ("columns",), optional=True, refusal=UNREAD_INT4),
    ),
)


def _cache(setting: Setting) -> dict[str, Any] | None:
    """The scheme of the cache: the source's own, where it is one of this layout (it may have a scale per head)."""
    if not setting.fp8_cache:
        return None
    own = setting.source.get("kv_cache_scheme")
    return dict(own) if isinstance(own, dict) and "strategy" in own else dict(CACHE)


def write_config(setting: Setting) -> dict[str, Any]:
    global_scaled = setting.format.has_global
    pack_format = "nvfp4-pack-quantized" if global_scaled else "mxfp4-pack-quantized"
    scale_dtype = "torch.float8_e4m3fn" if global_scaled else "torch.uint8"
    scheme = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if global_scaled else "group",
        "group_size": setting.format.block,
        "symmetric": True,
        "dynamic": False,
        "scale_dtype": scale_dtype,
        "zp_dtype": scale_dtype,
    }
    inputs = None
    if setting.activations == "static":
        inputs = {**scheme, "dynamic": "local", "observer": "static_minmax"} if global_scaled else {**scheme}
        if not global_scaled:
            inputs["dynamic"] = True
    group = {
        "targets": ["Linear"],
        "format": pack_format,
        "weights": scheme,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": pack_format,
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": _cache(setting),
        "ignore": list(setting.excluded),
        "config_groups": {"group_0": group},
        "version": VERSION,
    }


def read_config(config: Json) -> Claim:
    given = config.get("config_groups")
    groups = [group for group in given.values() if isinstance(group, dict)] if isinstance(given, dict) else []
    return Claim(
        layout="compressed-tensors",
        activations=any(_is_fp4(group.get("input_activations")) for group in groups),
        ignore=texts(config.get("ignore")),
        targets=tuple(dict.fromkeys(target for group in groups for target in texts(group.get("targets")))),
        formats=tuple(
            {"tensor_group": "nvfp4", "group": "mxfp4"}.get(str(group["weights"].get("strategy")), "")
            for group in groups
            if _is_fp4(group.get("weights"))
        ),
        beside=() if all(_is_fp4(group.get("weights")) for group in groups) else ("fp8",),
    )


def _is_fp4(scheme: object) -> bool:
    return isinstance(scheme, dict) and scheme.get("num_bits") == 4 and scheme.get("type") == "float"


LAYOUT = Layout(
    name="compressed-tensors",
    quant_method="compressed-tensors",
    storages=(NVFP4, MXFP4),
    read_only=(INT4,),
    write_config=write_config,
    read_config=read_config,
    readers=(Reader("vLLM", compressed_tensors),),
    run_time_names=True,
    all_under=r"re:(.*\.)?{}\..*",
)
