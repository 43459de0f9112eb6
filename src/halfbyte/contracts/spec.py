"""What a contract is: every choice that changes a bit, as data. Where peers round in another order, a named function.

A `Contract` holds one rule per format. The rule for NVFP4 has six slots. Every backend runs them in this order:

1. `factor`: computes the tensor-level number of the contract from the tensor's amax A.
2. `pre_scale`: computes the block scale, before rounding, from the block's amax v and the tensor-level number.
3. `scale_byte`: rounds the block scale to E4M3; says what the smallest scale is and what a zero becomes. S is the
   decoded byte.
4. `element`: computes y, which should be in [-6, 6], from x, S and the tensor-level number.
5. `rounding`: rounds y to a code: ties, sign of zero, NaN, overflow.
6. `stored` and `decode`: the number that is stored with the blocks, and how the peer decodes.

The functions in slots work on float32 arrays, with one rounding per operation. The first line of their docstring is
their formula, which shows the order of the operations. `docs/contracts.md` is generated from these lines.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Literal, cast

import numpy as np

from halfbyte.codec.bits import F32, U8, round_to
from halfbyte.codec.element import Tie
from halfbyte.errors import UnsupportedError
from halfbyte.formats.spec import BlockFormat, ElementFormat
from halfbyte.methods import METHODS, Amax, FourSix, Method
from halfbyte.methods.four_six import BlockError

Scaling = Literal["tensor", "row"]
Stored = Literal["amax", "multiplier", "encode factor", "none"]
Tile = tuple[int, int]
ScaleSearch = Callable[[F32, U8, Method], U8]
"""The peer's own search: blocks (rows, blocks, block), naive scale bytes (rows, blocks, 1), method → chosen bytes."""


@dataclass(frozen=True)
class TensorScale:
    """The tensor-level numbers of one quantization, shaped to broadcast over (rows, blocks, block)."""

    amax: F32
    """A: one number for the tensor, or one per row."""
    factor: F32
    """The result of the contract's `factor` for A; 1 for single-level contracts."""
    largest: np.float32
    """Q: the element value that a block's amax is scaled to, usually 6."""
    top: np.float32
    """c: the number that A is scaled to, Q times e4m3_max (usually 6·448)."""
    statistics: str
    """Short name of the dtype in which the peer holds its minima and maxima."""


@dataclass(frozen=True)
class Rounding:
    """How y becomes an element code."""

    tie: Tie = "even"
    sign: Literal["y < 0", "sign bit", "y <= 0"] = "y < 0"
    """When the sign bit of the code is set. With "y < 0", -0.0 gives code 0, and y < 0 that rounds to zero code 8."""
    nan_code: int = 0
    """Code for y = NaN, before the sign. An element format that has a NaN (E4M3) uses its NaN code instead."""
    zero_input: bool = False
    """If True, an x of 0 or NaN gives code 0, whatever y is (for peers that multiply by sign(x))."""
    wraps: bool = False
    """If True, y does not saturate: beyond 6 the grid continues, and the code is taken from the float's bits."""


@dataclass(frozen=True)
class ScaleByte:
    """How a block scale becomes an E4M3 byte (nearest even, saturating at 448; NaN is 0x7F)."""

    smallest: float = 0.0
    """A scale below this is raised to it before rounding."""
    for_zero: float | None = None
    """A scale that is exactly 0 is replaced by this before rounding."""
    for_zero_byte: int | None = None
    """A byte that is 0 after rounding is replaced by this."""


@dataclass(frozen=True)
class FourSixRule:
    """The arithmetic of 4over6 under one contract."""

    pre_scale: Callable[[F32, TensorScale], F32]
    exact_error: Callable[[F32, F32, F32, TensorScale], F32]
    """The difference d, on decoded values, from (q, S, x, tensor scale)."""
    fast_error: Callable[[F32, F32, F32, TensorScale], F32] | None
    block_sum: Callable[[F32], F32]
    """Sum over the last axis, in the contract's order."""
    tile_sum: Callable[[F32], F32] | None
    """Sum over the last two axes, (rows, block) of a tile, in the contract's order."""
    default: FourSix
    e4m3_maxes: tuple[int, ...]
    errors: tuple[str, ...] = ("mae", "mse")
    exact_row_error: Callable[[F32, F32, F32, TensorScale], F32] | None = None
    """The exact error under row scaling, if it differs from `exact_error`."""


@dataclass(frozen=True, kw_only=True)
class NVFP4Rule:
    """NVFP4 under one contract: the six slots, and the searches that the contract defines."""

    factor: Callable[[F32, np.float32, str], F32]
    pre_scale: Callable[[F32, TensorScale], F32]
    scale_byte: ScaleByte
    element: Callable[[F32, F32, TensorScale], F32]
    rounding: Rounding
    stored_as: Stored
    stored: Callable[[TensorScale], F32] | None
    decode: Callable[[F32, F32, F32, np.float32], F32]
    """Values from (q, S, stored scale, top), in the order of the contract's roundings."""
    multiplier: Callable[[F32, np.float32], F32]
    """The number that code × scale is multiplied by, from (stored scale, top)."""
    element_max: int = 6
    e4m3_max: int = 448
    statistics: Literal["input", "fp32"] = "fp32"
    tiles: tuple[Tile, ...] = ((1, 16),)
    row_scaling: bool = False
    four_six: FourSixRule | None = None
    block_search: Callable[[F32, F32, TensorScale, Method], F32] | None = None
    """Better block amaxes from (x, v, tensor scale, method), used instead of v in `pre_scale` (Model-Optimizer)."""
    searches: tuple[Method, ...] = ()
    """The methods that `block_search` serves."""
    search_rule: NVFP4Rule | None = None
    """Another rule, used when the caller asks for one of its `searches` (Model-Optimizer's static weights)."""
    scale_search: ScaleSearch | None = None
    """Used instead of the exact searches of Optimal and Hessian. Codes still come from `element` and `rounding`."""
    negative_zero: bool = True
    """Whether code 8 decodes to -0.0; otherwise to +0.0."""
    constant_factor: np.float32 | None = None
    """A tensor-level number given by the caller, used instead of `factor`."""

    def for_method(self, method: Method) -> NVFP4Rule:
        """The rule that serves a method: this rule, or `search_rule` if it has the method's search."""
        if self.search_rule is not None and method in self.search_rule.searches:
            return self.search_rule
        return self

    def anchor(self, method: Method) -> np.float32:
        """The number c that the tensor's amax is scaled to under that method."""
        e4m3_max = self.e4m3_max
        if isinstance(method, FourSix):
            e4m3_max = method.e4m3_max
        return np.float32(self.element_max * e4m3_max)


@dataclass(frozen=True, kw_only=True)
class MXRule:
    """A block format with power-of-two scales under one contract."""

    scale: Callable[[F32, str, ElementFormat], tuple[U8, F32]]
    """(E8M0 bytes, float32 scales for the elements) from (block amaxes, dtype of the statistics, element format)."""
    element: Callable[[F32, F32], F32]
    rounding: Rounding
    decode: Callable[[F32, U8], F32]
    statistics: Literal["input", "fp32"] = "fp32"
    rounds_quotient: bool = False
    """Whether y is rounded to the dtype of the statistics before it becomes a code."""
    nearest: Callable[[F32, F32], U8] | None = None
    """Codes directly from (x, scale), used instead of `element` and `rounding` (gguf)."""
    negative_zero: bool = True
    blocks: tuple[int, ...] | None = None
    """The only block lengths that this contract has; None: all that the format allows."""

    def quotient(self, x: F32, scale: F32, statistics: str) -> F32:
        """y by the element formula. It is rounded once more if the peer computes y in 16 bits."""
        y = self.element(x, scale)
        return round_to(y, statistics) if self.rounds_quotient else y

    scale_search: ScaleSearch | None = None
    """Used instead of the exact searches of Optimal and Hessian. Codes still come from `element` and `rounding`."""


@dataclass(frozen=True, kw_only=True)
class DecodeRule:
    """A format that the peer reads but does not write."""

    decode: Callable[[F32, U8], F32]
    negative_zero: bool = True


Rule = NVFP4Rule | MXRule | DecodeRule


@dataclass(frozen=True, kw_only=True)
class CastRule:
    """How a peer casts MXFP4 to NVFP4: through bfloat16, or with amaxes computed from the exponents."""

    factor: Callable[[int], F32] | None = None
    """The tensor-level number from k_max; None: decode to bfloat16 and quantize by the contract's NVFP4 rule."""
    block_amax: Callable[[F32, U8], F32] | None = None
    """The amaxes that block scales are computed from: a function of (largest element value per block, E8M0 bytes)."""
    k_max: int | None = None
    """The largest exponent of all tensors that share the scale. None: that of the tensor, without bytes of 0."""


_WITH_DEFAULTS: dict[type[Method], Method] = {}


def with_defaults(kind: type[Method]) -> Method:
    """A method with its default options: the same object each time, by which backends know it again."""
    if kind not in _WITH_DEFAULTS:
        _WITH_DEFAULTS[kind] = kind()
    return _WITH_DEFAULTS[kind]


def defined_methods(rule: Rule) -> list[Method]:
    """The methods that a rule defines, with the options that apply when a caller gives only the name."""
    if isinstance(rule, DecodeRule):
        return []
    methods: list[Method] = [with_defaults(kind) for kind in METHODS.values() if kind.everywhere and not kind.needs]
    if isinstance(rule, NVFP4Rule):
        methods += (rule.search_rule or rule).searches
        if rule.four_six is not None:
            methods.append(rule.four_six.default)
    return methods


def spelled_methods(rule: Rule) -> list[str]:
    """The spelling of every method that a rule takes, with every choice of options that it defines."""
    if isinstance(rule, DecodeRule):
        return []
    found = [text for kind in METHODS.values() if kind.everywhere for text in (kind.name, *kind.variants)]
    if isinstance(rule, NVFP4Rule):
        found += [method.spelling for method in (rule.search_rule or rule).searches]
        if rule.four_six is not None:
            fast = (False, True) if rule.four_six.fast_error is not None else (False,)
            found += [
                FourSix(cast("BlockError", error), top, each).spelling
                for error in rule.four_six.errors
                for top in rule.four_six.e4m3_maxes
                for each in fast
            ]
    return list(dict.fromkeys(found))


@dataclass(frozen=True)
class Transform:
    """Changes to the operand before it is quantized."""

    columnwise: bool = False
    """Quantize the transpose of the (rows, last axis) matrix."""
    hadamard: bool = False
    """Multiply groups of 16 along the block axis by the random Hadamard matrix."""
    random_signs: bool = True
    """If True, use the peers' fixed sign vector; otherwise all signs are +."""


@dataclass(frozen=True, kw_only=True)
class Contract:
    """Which bytes an encoder must pick. The functions of `halfbyte.contracts` create it; it compares by value."""

    name: str
    source: str
    """The project and version whose bytes these are."""
    rules: Mapping[str, Rule] = field(hash=False)
    ragged: Literal["pad", "refuse"] = "refuse"
    """What to do if the last axis is not a multiple of the block: pad with zeros (and crop again), or refuse."""
    transform: Transform = Transform()
    method: Method | Literal["hessian"] = Amax()
    """The method if the caller names none; the same for `tile` and `scaling`. "hessian": the caller must give one."""
    tile: Tile | None = None
    scaling: Scaling = "tensor"
    cast: CastRule | None = None
    """The peer's own cast from MXFP4 to NVFP4, if this contract is one of the cast variants."""
    options: tuple[tuple[str, object], ...] = ()
    """The options of this contract that differ from the defaults."""

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(f'{key}={value!r}' for key, value in self.options)})"

    def rule(self, format: BlockFormat) -> Rule:
        """The rule for a format, or an error that names the formats this contract has."""
        if format.name not in self.rules:
            known = ", ".join(self.rules)
            raise UnsupportedError(f"contract {self.name} has no {format.name}; it has {known}")
        return self.rules[format.name]


def formulas(rule: Rule) -> dict[str, str]:
    """The formula of each slot that holds a function: the first line of the function's docstring."""
    found: dict[str, str] = {}
    for name in (slot.name for slot in fields(rule)):
        value = getattr(rule, name)
        if isinstance(value, FourSixRule):
            found |= {
                f"4over6 {part}": formula(getattr(value, part)) for part in FOUR_SIX_SLOTS if getattr(value, part)
            }
        elif callable(value):
            found[name] = formula(value)
    return found


FOUR_SIX_SLOTS = ("pre_scale", "exact_error", "exact_row_error", "fast_error", "block_sum", "tile_sum")


def formula(function: Callable[..., object]) -> str:
    """The formula that a slot's function computes."""
    named = function.func if isinstance(function, functools.partial) else function
    return (inspect.getdoc(named) or "").split("\n")[0]
