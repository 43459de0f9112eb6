"""What a layout is: which tensors a quantized module becomes in a checkpoint, and what config files say about it.

A layout knows names, dtypes, shapes and config keys. It computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from halfbyte.formats import BlockFormat

Role = Literal["codes", "scales", "multiplier", "divisor", "input_multiplier", "input_divisor", "values"]
"""What a part holds: packed codes; block scales; the tensor scale as it multiplies, or as it divides; the same of the
activations; plain values."""

Activations = Literal["none", "static"]
"""none: weights alone are FP4 (W4A16). static: activations too (W4A4), with one stored scale a module."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a quantized module."""

    name: str
    dtype: str
    """As a safetensors header spells it."""
    shape: tuple[int, ...]
    role: Role
    transposed: bool = False
    """Each matrix of a stack is stored as its transpose."""


@dataclass(frozen=True, slots=True)
class Stack:
    """A weight as a layout sees it: one (rows, columns) matrix, or `count` of them that are one tensor."""

    module: str
    rows: int
    columns: int
    count: int = 0
    """0: a plain matrix."""


@dataclass(frozen=True)
class Setting:
    """What a config has to say: which modules are FP4 and which are not."""

    format: BlockFormat
    activations: Activations
    quantized: Sequence[str]
    excluded: Sequence[str]
    """Full module names, never patterns."""
    source: Mapping[str, Any]
    """quantization_config of the source, for layouts that build on it."""

    @property
    def fp8_cache(self) -> bool:
        """Whether the source asks for an FP8 cache of keys and values; its scales are copied with everything else."""
        scheme = self.source.get("kv_cache_scheme")
        named = self.source.get("kv_cache_quant_algo") == "FP8"
        return named or (isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"))


class Layout(Protocol):
    """Where bytes sit in a checkpoint."""

    name: str
    formats: tuple[str, ...]

    def parts(self, stack: Stack, format: BlockFormat, activations: Activations) -> tuple[Part, ...]:
        """The tensors of one module."""

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        """quantization_config of config.json."""

    def extra_files(self, setting: Setting) -> dict[str, dict[str, Any]]:
        """Other JSON files that readers of this layout look for."""
