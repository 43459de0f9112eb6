"""The words in which a layout is described. One file per layout, `layouts/<name>.py`, holds the description.

A `Storage` is a table: which tensors a quantized weight consists of, with suffix, dtype and shape of each. A `Layout`
holds the storages that its checkpoints use, what config files say about them, and how readers match its exclude list.
Convert writes and reads by these tables, online writes by them, verify checks by them. A layout computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal

from halfbyte.errors import UnsupportedError
from halfbyte.formats import FORMATS, BlockFormat
from halfbyte.models.experts import Stacking

Json = Mapping[str, Any]

FLOATS = ("BF16", "F16", "F32")
"""Dtypes of unquantized weights, and of scales that are floats, as a safetensors header spells them."""

Role = Literal[
    "codes", "scales", "multiplier", "divisor", "input_multiplier", "input_divisor", "values", "shape", "zero_points",
    "order", "prescale",
]  # fmt: skip
"""What a tensor holds: packed codes; block scales; the tensor scale as it multiplies, or as it divides; the same for
activations; plain values; the logical shape; zero points; a permutation of groups; factors of the input columns."""

Axis = Literal["experts", "rows", "columns", "packed", "blocks", "block_bytes"] | int
"""What an axis of a tensor counts. packed: columns / elements per stored number; blocks: columns / block length."""

Activations = Literal["none", "static"]
"""none: weights alone are FP4 (W4A16). static: activations too (W4A4), with one stored scale per module."""

Grid = Callable[[int, int, tuple[int, ...]], tuple[int, int]]
"""(rows, columns, shape of the scales) → scales along both axes of the weight; CheckpointError if they do not fit."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of a quantized module, as it is written."""

    name: str
    dtype: str
    """As a safetensors header spells it."""
    shape: tuple[int, ...]
    role: Role
    transposed: bool = False
    """Each matrix of a stack is stored as its transpose."""


@dataclass(frozen=True, slots=True)
class LogicalWeight:
    """A weight as a layout sees it: one (rows, columns) matrix, or one per expert in a common tensor."""

    module: str
    rows: int
    columns: int
    experts: int = 0
    """0: a plain matrix."""


@dataclass(frozen=True, slots=True)
class PartRule:
    """One row of a storage's table."""

    role: Role
    suffix: str
    """What follows the name of the module or of the stack."""
    dtypes: tuple[str, ...]
    """What readers accept. The first is written."""
    shape: tuple[Axis, ...] | Grid
    """By axes; or a function that checks shapes of which several are possible."""
    optional: bool = False
    tells: Literal["nothing", "presence", "dtype"] = "nothing"
    """Whether this tensor, or this tensor with one of its dtypes, tells the storage from others with such codes."""
    refusal: str = ""
    """Why a weight that has this tensor cannot be read."""


@dataclass(frozen=True, eq=False)
class Storage:
    """One way to store a quantized weight."""

    name: str
    """In words: "nvfp4 (modelopt)"."""
    layout: str
    """The layout whose tensors these are."""
    format: str
    """nvfp4, mxfp4, fp8 or int4."""
    parts: tuple[PartRule, ...]
    block: int = 0
    """Elements per scale along a row; 0 where that is not fixed."""
    packing: int = 2
    """Elements per stored number of the codes."""
    without: tuple[str, ...] = ()
    """Suffixes of tensors that tell that the weight is stored in another way."""

    @cached_property
    def rules(self) -> Mapping[Role, PartRule]:
        return {rule.role: rule for rule in self.parts}

    @property
    def codes(self) -> PartRule:
        return self.rules["codes"]

    @property
    def required(self) -> list[PartRule]:
        return [rule for rule in self.parts if not rule.optional]

    @property
    def divides(self) -> bool:
        """Whether the tensor scale divides."""
        return "divisor" in self.rules

    @property
    def global_role(self) -> Role:
        return "divisor" if self.divides else "multiplier"

    @property
    def input_role(self) -> Role:
        return "input_divisor" if self.divides else "input_multiplier"

    @property
    def has_tensor_scale(self) -> bool:
        return self.global_role in self.rules

    @property
    def stacked(self) -> bool:
        """Whether one tensor holds all experts of a layer."""
        return not callable(self.codes.shape) and "experts" in self.codes.shape

    def sizes(self, shape: tuple[int, ...]) -> tuple[int, int, int] | None:
        """(experts, rows, columns) of a weight whose codes have that shape; None for a shape that they cannot have."""
        axes = self.codes.shape
        if callable(axes) or len(axes) != len(shape):
            return None
        known = dict(zip(axes, shape, strict=True))
        if "columns" in known:
            columns = known["columns"]
        else:
            columns = known["packed"] * self.packing if "packed" in known else known["blocks"] * self.block
        found = known.get("experts", 0), known["rows"], columns
        fits = self.shape_of(self.codes, *found) == shape and (not self.block or columns % self.block == 0)
        return found if fits else None

    def shape_of(self, rule: PartRule, experts: int, rows: int, columns: int) -> tuple[int, ...]:
        """The shape of one tensor of a weight of these sizes; () where the rule is a function."""
        if callable(rule.shape):
            return ()
        lengths: dict[Axis, int] = {
            "experts": experts,
            "rows": rows,
            "columns": columns,
            "packed": columns // self.packing,
            "blocks": columns // self.block if self.block else 0,
            "block_bytes": self.block // self.packing,
        }
        return tuple(axis if isinstance(axis, int) else lengths[axis] for axis in rule.shape)

    def describe(self, rule: PartRule) -> str:
        """The shape of a tensor in words: [out, in/16]."""
        words: dict[Axis, str] = {
            "rows": "out",
            "columns": "in",
            "packed": f"in/{self.packing}",
            "blocks": f"in/{self.block}",
            "block_bytes": str(self.block // self.packing),
        }
        axes = () if callable(rule.shape) else rule.shape
        return f"[{', '.join(words.get(axis, str(axis)) for axis in axes)}]"

    def written(self, weight: LogicalWeight, activations: Activations) -> tuple[Part, ...]:
        """The tensors of one weight, as they are written."""
        sizes = weight.experts, weight.rows, weight.columns
        return tuple(
            Part(weight.module + rule.suffix, rule.dtypes[0], shape, rule.role, transposed)
            for rule, shape, transposed in _written(self, sizes, activations)
        )


def is_transposed(rule: PartRule) -> bool:
    """Whether the rows of each matrix are the last axis."""
    return not callable(rule.shape) and len(rule.shape) > 1 and rule.shape[-1] == "rows"


@lru_cache(maxsize=256)
def _written(
    storage: Storage, sizes: tuple[int, int, int], activations: Activations
) -> tuple[tuple[PartRule, tuple[int, ...], bool], ...]:
    """(rule, shape, whether transposed) of the tensors of a weight. Kept, because a model has few different sizes."""
    with_inputs = activations == "static" and storage.has_tensor_scale
    return tuple(
        (rule, storage.shape_of(rule, *sizes), is_transposed(rule))
        for rule in storage.parts
        if not rule.optional or (with_inputs and rule.role == storage.input_role)
    )


def asks_for_fp8_cache(config: Json) -> bool:
    """Whether a quantization_config asks for an FP8 cache of keys and values."""
    scheme = config.get("kv_cache_scheme")
    named = config.get("kv_cache_quant_algo") == "FP8"
    return named or (isinstance(scheme, dict) and (scheme.get("num_bits"), scheme.get("type")) == (8, "float"))


@dataclass(frozen=True)
class Setting:
    """What a config has to say: which modules are FP4 and which are not."""

    format: BlockFormat
    activations: Activations
    quantized: Sequence[str]
    excluded: Sequence[str]
    """Full module names, never patterns."""
    source: Json
    """quantization_config of the source, for layouts that build on it."""

    @property
    def fp8_cache(self) -> bool:
        """Whether the source asks for an FP8 cache of keys and values."""
        return asks_for_fp8_cache(self.source)


@dataclass(frozen=True)
class Claim:
    """What a quantization_config says, in one form for all layouts."""

    layout: str | None
    """The name of a layout, or the method as given; None where there is no such config."""
    activations: bool
    """Whether readers will quantize activations to FP4, and so want input scales."""
    ignore: tuple[str, ...] = ()
    targets: tuple[str, ...] = ("Linear",)
    formats: tuple[str, ...] = ()
    """Formats that the config speaks of: nvfp4, mxfp4."""
    layers: tuple[str, ...] | None = None
    """Modules that are quantized, where the config names each."""
    beside: tuple[str, ...] = ()
    """Other layouts that the same config explains: FP8 beside FP4."""


Matcher = Callable[[str, Sequence[str]], bool]
"""(name that a reader asks for, exclude list) → whether the reader takes the module as unquantized."""


@dataclass(frozen=True)
class Reader:
    """A program that reads a layout, and how it matches the exclude list."""

    name: str
    excludes: Matcher
    asks_for_fused: bool = True
    """Whether it asks for modules under the names that it fuses them to. One that asks for them under their own is
    checked for quantized modules that it would exclude, not for plain ones that it would miss."""
    matches_substrings: bool = False
    """Whether a listed name excludes every module whose name contains it."""


def no_files(setting: Setting) -> dict[str, dict[str, Any]]:
    """The files of a layout that has none but config.json."""
    return {}


@dataclass(frozen=True)
class Layout:
    """Where bytes sit in a checkpoint, and what its config files say."""

    name: str
    quant_method: str
    """How the `quant_method` of its configs begins."""
    read_config: Callable[[Json], Claim | None]
    """What a config with that quant_method says; None if it is that of another layout."""
    storages: tuple[Storage, ...] = ()
    """What is written, at most one per format for matrices and one for stacks. All of it is read, too."""
    read_only: tuple[Storage, ...] = ()
    """What is read and never written."""
    write_config: Callable[[Setting], dict[str, Any]] | None = None
    """The quantization_config to write; None for a layout that is only read."""
    extra_files: Callable[[Setting], dict[str, dict[str, Any]]] = no_files
    """Other JSON files that readers look for."""
    config_file: str = ""
    """The one of these that stands in for a config.json without quantization_config."""
    read_config_file: Callable[[Json], Json] = dict
    """Its content in the form of a quantization_config; {} if it says nothing."""
    readers: tuple[Reader, ...] = ()
    stacks: Literal["never", "some families", "always"] = "never"
    """Whether stacked experts stay in one tensor. some families: those that say so."""
    stacking: Stacking | None = None
    """The order of rows in stacks, where readers know only one."""
    run_time_names: bool = False
    """Whether a reader looks modules up under transformers' names, which may differ from those on disk."""
    all_under: str = ""
    """The entry of an exclude list for all modules under one, with {} for its name; "" where there is none."""
    needs_input_scales: bool = False
    """Whether readers expect input scales unless they are told otherwise."""
    replaces: str = ""
    """The layout that users name; this one is written in its place for families that stay FP8 elsewhere."""

    def quantization_config(self, setting: Setting) -> dict[str, Any]:
        """quantization_config of config.json."""
        if self.write_config is None:
            raise UnsupportedError(f"layout {self.name} is read and never written")
        return self.write_config(setting)

    @property
    def formats(self) -> tuple[str, ...]:
        """Formats that can be written."""
        return tuple(dict.fromkeys(storage.format for storage in self.storages if storage.format in FORMATS))

    def parts(self, weight: LogicalWeight, format: BlockFormat, activations: Activations) -> tuple[Part, ...]:
        """The tensors of one module."""
        for storage in self.storages:
            if storage.format == format.name and storage.stacked == (weight.experts > 0):
                return storage.written(weight, activations)
        if weight.experts:
            raise UnsupportedError(f"{weight.module}: {self.name} has no stacked experts, only one module each")
        raise UnsupportedError(
            f"{weight.module}: the {self.name} layout holds stacked experts only; choose another --layout"
        )


def texts(value: object) -> tuple[str, ...]:
    """A list of a config as texts; () for anything else."""
    return tuple(str(item) for item in value) if isinstance(value, list) else ()
