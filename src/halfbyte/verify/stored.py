"""Which tensors of a checkpoint form which weights: found from names and dtypes alone, whoever wrote them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from halfbyte.checkpoint.io.index import Checkpoint, Tensor

FLOATS = ("BF16", "F16", "F32", "F64")


@dataclass(frozen=True)
class Kind:
    """One way to store a quantized weight: its tensors by role, with dtype and rank."""

    name: str
    layout: str
    format: str
    """"nvfp4", "mxfp4", "fp8" or "int4"."""
    suffixes: Mapping[str, str]
    """Role → what follows the weight's name. Roles: codes, scales, global, input; zeros and order of INT4."""
    dtypes: Mapping[str, tuple[str, ...]]
    """Role → the dtypes that readers accept."""
    block: int = 0
    """Elements a scale covers; 0 where that is not along one axis."""
    stack: bool = False
    """Whether the tensors hold all experts of a layer."""
    divisor: bool = False
    """Whether the global scale divides."""

    @property
    def required(self) -> tuple[str, ...]:
        return tuple(role for role in self.suffixes if role not in ("input", "zeros", "order"))


F32, E4M3, U8 = ("F32",), ("F8_E4M3",), ("U8",)
NVFP4_DTYPES = {"codes": U8, "scales": E4M3, "global": F32, "input": F32}
MODELOPT = Kind(
    "nvfp4 (modelopt)",
    "modelopt",
    "nvfp4",
    {"codes": ".weight", "scales": ".weight_scale", "global": ".weight_scale_2", "input": ".input_scale"},
    NVFP4_DTYPES,
    16,
)
MODELOPT_STACK = Kind(
    "nvfp4 stack (modelopt)",
    "modelopt",
    "nvfp4",
    {"codes": "", "scales": "_weight_scale", "global": "_weight_scale_2", "input": "_input_scale"},
    NVFP4_DTYPES,
    16,
    stack=True,
)
COMPRESSED = Kind(
    "nvfp4 (compressed-tensors)",
    "compressed-tensors",
    "nvfp4",
    {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "global": ".weight_global_scale",
        "input": ".input_global_scale",
    },
    NVFP4_DTYPES,
    16,
    divisor=True,
)
COMPRESSED_MX = Kind(
    "mxfp4 (compressed-tensors)",
    "compressed-tensors",
    "mxfp4",
    {"codes": ".weight_packed", "scales": ".weight_scale"},
    {"codes": U8, "scales": U8},
    32,
)
GPT_OSS = Kind(
    "mxfp4 (gpt-oss)",
    "gpt-oss",
    "mxfp4",
    {"codes": "_blocks", "scales": "_scales"},
    {"codes": U8, "scales": U8},
    32,
    stack=True,
)
QUARK_MX = Kind(
    "mxfp4 (quark)",
    "quark",
    "mxfp4",
    {"codes": ".weight", "scales": ".weight_scale"},
    {"codes": U8, "scales": U8},
    32,
)
DEEPSEEK_MX = Kind(
    "mxfp4 (deepseek)",
    "deepseek",
    "mxfp4",
    {"codes": ".weight", "scales": ".scale"},
    {"codes": ("I8",), "scales": ("F8_E8M0", "U8")},
    32,
)
FP8_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
FP8 = {
    suffix: Kind(
        f"fp8 ({suffix[1:]})",
        "fp8",
        "fp8",
        {"codes": ".weight", "scales": suffix},
        {"codes": E4M3, "scales": FP8_SCALES},
    )
    for suffix in (".weight_scale_inv", ".weight_scale", ".scale")
}
INT4 = Kind(
    "int4 (compressed-tensors)",
    "compressed-tensors",
    "int4",
    {
        "codes": ".weight_packed",
        "scales": ".weight_scale",
        "zeros": ".weight_zero_point",
        "order": ".weight_g_idx",
    },
    {"codes": ("I32",), "scales": FLOATS, "zeros": ("I32", "I8"), "order": ("I32", "I64")},
)

HELPERS = (
    ".weight_scale",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_scale_inv",
    ".input_scale",
    ".input_global_scale",
    ".weight_packed",
    "_weight_scale",
    "_weight_scale_2",
    "_input_scale",
    "_blocks",
    "_scales",
)
"""Endings of tensors that mean nothing without the weight they belong to."""


@dataclass(frozen=True)
class Weight:
    """A quantized weight: which tensors it has. Some may be missing."""

    name: str
    """The module ("model.layers.0.mlp.up_proj") or the stack ("model.layers.0.mlp.experts.down_proj")."""
    kind: Kind
    parts: Mapping[str, Tensor]

    @property
    def parent(self) -> str:
        return self.name.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


@dataclass(frozen=True)
class Weights:
    """A checkpoint's tensors, each in exactly one of three places."""

    quantized: Mapping[str, Weight]
    plain: Mapping[str, Tensor]
    """Tensors that are what they say: BF16 and so on, by tensor name."""
    stray: Mapping[str, Tensor]
    """Scales and codes that belong to no weight."""

    def without(self, names: Container[str]) -> Weights:
        """All but the quantized weights that are called so, or have a tensor that is."""
        kept = {
            name: weight
            for name, weight in self.quantized.items()
            if name not in names and not any(part.name in names for part in weight.parts.values())
        }
        return Weights(kept, self.plain, self.stray)


def find_weights(checkpoint: Checkpoint) -> Weights:
    """Sort every tensor of a checkpoint into quantized weights, plain tensors and strays."""
    tensors = checkpoint.tensors
    quantized = {weight.name: weight for weight in _weights(tensors)}
    used = {part.name for weight in quantized.values() for part in weight.parts.values()}
    rest = {name: tensor for name, tensor in tensors.items() if name not in used}
    stray = {name: tensor for name, tensor in rest.items() if _is_stray(name, tensor)}
    plain = {name: tensor for name, tensor in rest.items() if name not in stray}
    return Weights(quantized, plain, stray)


def _is_stray(name: str, tensor: Tensor) -> bool:
    return name.endswith(HELPERS) or (name.endswith(".scale") and tensor.info.dtype == "F8_E8M0")


def _weights(tensors: Mapping[str, Tensor]) -> Iterator[Weight]:
    for name, tensor in tensors.items():
        kind = _kind(name, tensor.info.dtype, len(tensor.info.shape), tensors)
        if kind is not None:
            weight = name.removesuffix(kind.suffixes["codes"])
            parts = {role: tensors.get(weight + suffix) for role, suffix in kind.suffixes.items()}
            yield Weight(weight, kind, {role: part for role, part in parts.items() if part is not None})


def _kind(name: str, dtype: str, rank: int, tensors: Mapping[str, Tensor]) -> Kind | None:
    """The way in which the weight is stored whose codes this tensor is; None for any other tensor."""

    def has(suffix: str) -> bool:
        return name.rpartition(".")[0] + suffix in tensors

    if name.endswith(".weight_packed"):
        if dtype == "I32":
            return INT4
        scales = tensors.get(name.removesuffix("_packed") + "_scale")
        mx = scales is not None and scales.info.dtype == "U8" and not has(".weight_global_scale")
        return COMPRESSED_MX if mx else COMPRESSED
    if name.endswith(".weight"):
        if dtype == "U8":
            scales = tensors.get(name + "_scale")
            mx = scales is not None and scales.info.dtype == "U8" and not has(".weight_scale_2")
            return QUARK_MX if mx else MODELOPT
        if dtype == "I8" and has(".scale"):
            return DEEPSEEK_MX
        if dtype == "F8_E4M3":
            return next((kind for suffix, kind in FP8.items() if has(suffix)), None)
    if name.endswith("_blocks") and dtype == "U8" and name.removesuffix("_blocks") + "_scales" in tensors:
        return GPT_OSS
    if rank == 3 and dtype == "U8" and name.endswith(("gate_up_proj", "down_proj")):
        return MODELOPT_STACK
    return None
