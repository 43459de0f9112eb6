"""Which kernel serves a request: one explicit list. What is not on it gets a reason, never a guess.

`choose` answers for quantization, `choose_decoder` for decoding. The backend's `supports` and its dispatch ask the same
function, so that a kernel runs only for what it was written for. Answers are cached by what they depend on: format,
contract, method without its arrays, tile, scaling and dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from enum import Enum

from halfbyte.backends.gpu.constants import (
    EAGER_SWEEP,
    FUSED_SWEEP,
    STATIC_FOUR_SIX,
    Constants,
    block_constants,
    four_six_constants,
    prepare_constants,
    rounding_constants,
)
from halfbyte.backends.gpu.slots import (
    AMAX_READERS,
    MX_BLOCKS,
    NVFP4_BLOCKS,
    decoding_reason,
    exact_search_reason,
    format_reason,
    four_six_reason,
    mx_reason,
    nvfp4_reason,
    operand_reason,
    qwantize_reason,
    static_reason,
)
from halfbyte.backends.numbering import DECODES, DTYPE_NUMBERS, MX_SCALES, SIGNS, number_of
from halfbyte.backends.protocol import Reason
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, expressions, reductions
from halfbyte.contracts.arithmetic import first_scale_byte, four_six_error
from halfbyte.contracts.spec import DecodeRule, Rounding, ScaleByte, Scaling, Tile
from halfbyte.formats import E2M1, BlockFormat
from halfbyte.methods import Amax, FourSix, Hessian, Method, Optimal, Sweep
from halfbyte.request import Request


class KernelKind(Enum):
    """The ways to quantize; launch.py has a case for each."""

    PLAIN = "one scale per block or tile, from its amax"
    FOUR_SIX = "4over6 of blocks, and of tiles whose rows are added"
    FOUR_SIX_TILES = "4over6 of tiles whose elements are added in one order"
    STATIC = "Model-Optimizer's searches for static weights"
    OPTIMAL = "the least squared error, weighted or not"
    HESSIAN = "the least error through a Hessian"
    QWANTIZE = "qwantize's search over E4M3 scales"
    MX = "power-of-two scales"
    MX_OPTIMAL = "the least squared error under power-of-two scales, E2M1 elements"
    MX_SEARCH = "an exact search over power-of-two scales"
    MX_QWANTIZE = "qwantize's search over power-of-two scales"


@dataclass(frozen=True, eq=False)
class ChosenKernel:
    """A kernel, and what it is compiled with for a request."""

    family: KernelKind
    rule: NVFP4Rule | MXRule
    """The rule that serves the method."""
    constants: Constants
    prepare: Constants = field(default_factory=dict)
    """NVFP4: constants of the kernel that makes a tensor's numbers from its amax."""
    short: bool = False
    """Whether the short formulas of the kernel are the contract's."""
    reads_amax: bool = True
    """NVFP4: whether anything looks at the tensor's amax."""
    table: str | None = None
    """The CUDA C++ kernel that can serve instead (cuda/table_kernels.py), where the device has what it needs."""


@dataclass(frozen=True)
class Decoder:
    """How a request is decoded."""

    decode: int | None
    """The formula's number; None: by a table of the scale bytes."""
    top: float
    """c, which one formula divides by."""
    wide: bool
    """Whether an element is a byte (E4M3)."""
    negative_zero: bool


Search = str
"""An exact search without its arrays: "optimal", "weighted", "nearest" or "descent"."""

PLAIN_METHODS = (Amax, FourSix, Sweep)
"""Methods that hold no arrays, so that they can be part of a key."""

METHODS = (*PLAIN_METHODS, Optimal, Hessian)

REPRESENTATIVE = Optimal()
"""Stands for every exact search where a rule is asked about a method."""

SHORT_TOPS = (6 * 448, 6 * 256)
"""The c for which nothing under- or overflows in the short formulas while A is regular."""

LARGEST_TOP = 1 << 32

LARGEST_FIRST = 12
"""The smallest scale byte that the CUDA C++ searches compare without asking for the contract's smallest."""

UNDOING = (
    (expressions.store_amax, expressions.amax_over_top),
    (expressions.store_reciprocal, expressions.as_stored),
    (expressions.store_reciprocal_or_zero, expressions.as_stored),
    (expressions.store_factor, expressions.reciprocal_of_stored),
)
"""Pairs of stored scale and multiplier that give 1/enc but for roundings: then y is x'/s' of the search."""


def choose(request: Request) -> ChosenKernel | Reason:
    """The kernel that serves a request, or the reason why none does."""
    method = request.method
    asked = _without_arrays(method)
    if asked is None:
        return Reason(f"no GPU kernel knows method {method.name} of class {type(method).__name__}")
    if type(request.contract) is not Contract:
        return Reason(f"no GPU kernel knows contracts of class {type(request.contract).__name__}")
    key = (request.format, request.contract, asked, request.tile, request.scaling, request.dtype)
    try:
        return _choose(*key)
    except TypeError:  # a contract made by hand may hold options that cannot be hashed
        return _choose.__wrapped__(*key)


def _without_arrays(method: Method) -> Method | Search | None:
    """The method as a key; None for classes that no kernel was written for, subclasses of known ones included."""
    if type(method) in PLAIN_METHODS:
        return method
    if type(method) is Optimal:
        return "optimal" if method.weights is None else "weighted"
    if type(method) is Hessian:
        return method.codes
    return None


@functools.lru_cache(maxsize=512)
def _choose(
    format: BlockFormat, contract: Contract, asked: Method | Search, tile: Tile, scaling: Scaling, dtype: str
) -> ChosenKernel | Reason:
    rule = contract.rules.get(format.name)
    if type(rule) is NVFP4Rule:
        return _choose_nvfp4(NVFP4Case(format, asked, tile, scaling, dtype), rule)
    if type(rule) is MXRule:
        return _choose_mx(rule, format, asked, tile, dtype)
    if isinstance(rule, DecodeRule):
        return Reason(f"contract {contract.name} decodes {format.name} only")
    return Reason(f"contract {contract.name} has no rule for {format.name} that a GPU kernel knows")


# --- NVFP4 ---


@dataclass(frozen=True)
class NVFP4Case:
    """What is asked for, apart from the rule."""

    format: BlockFormat
    asked: Method | Search
    tile: Tile
    scaling: Scaling
    dtype: str

    @property
    def method(self) -> Method:
        return self.asked if isinstance(self.asked, Method) else REPRESENTATIVE


def _choose_nvfp4(case: NVFP4Case, first: NVFP4Rule) -> ChosenKernel | Reason:
    rule = first.for_method(case.method)
    if type(rule) is not NVFP4Rule:
        return Reason(f"no GPU kernel knows rules of class {type(rule).__name__}")
    four_six = rule.four_six if isinstance(case.asked, FourSix) else None
    pre_scale = rule.pre_scale if four_six is None else four_six.pre_scale
    reason = (
        format_reason(case.format, NVFP4_BLOCKS)
        or operand_reason(case.format, case.tile, case.scaling, case.dtype)
        or nvfp4_reason(rule, pre_scale)
    )
    if reason is not None:
        return reason
    family = _nvfp4_family(case, first, rule)
    if isinstance(family, Reason):
        return family
    if case.tile[0] != 1 and family not in (KernelKind.PLAIN, KernelKind.FOUR_SIX, KernelKind.FOUR_SIX_TILES):
        return Reason(f"no GPU kernel has tiles of {case.tile[0]}x{case.tile[1]} for {family.value}")
    constants = {"N": case.format.block, **block_constants(rule, pre_scale, case.format.element, case.dtype)}
    constants |= _family_constants(family, rule, case)
    short = _is_short(family, rule, pre_scale, case)
    return ChosenKernel(
        family=family,
        rule=rule,
        constants=constants,
        prepare=prepare_constants(rule, case.method, case.dtype),
        short=short,
        reads_amax=_reads_amax(family, rule, pre_scale, case),
        table=_table(family, short, constants, case),
    )


def _nvfp4_family(case: NVFP4Case, first: NVFP4Rule, rule: NVFP4Rule) -> KernelKind | Reason:
    """The family, in the order in which the reference asks."""
    asked = case.asked
    if isinstance(asked, FourSix) and rule.four_six is not None:
        error = four_six_error(rule.four_six, asked, case.scaling)
        reason = four_six_reason(rule.four_six, asked, error, case.tile)
        in_one_order = case.tile[0] != 1 and rule.four_six.tile_sum is reductions.eight_lanes_flat
        return reason or (KernelKind.FOUR_SIX_TILES if in_one_order else KernelKind.FOUR_SIX)
    if isinstance(asked, Method):
        if rule.block_search is not None and asked in rule.searches:
            if type(asked) not in (FourSix, Sweep):
                return Reason(f"no GPU kernel searches block amaxes by method {asked.name}")
            return static_reason(rule) or KernelKind.STATIC
        return KernelKind.PLAIN if type(asked) is Amax else Reason(f"method {asked.name} has no GPU kernel here")
    if (reason := exact_search_reason(first)) is not None:
        return reason
    if rule.scale_search is not None:
        return qwantize_reason(rule, asked) or KernelKind.QWANTIZE
    return KernelKind.OPTIMAL if asked in ("optimal", "weighted") else KernelKind.HESSIAN


def _family_constants(family: KernelKind, rule: NVFP4Rule, case: NVFP4Case) -> Constants:
    """Constants of one family's kernel, on top of the slots that all of them run."""
    asked = case.asked
    if isinstance(asked, FourSix) and rule.four_six is not None:
        top: Constants = {"TOP": float(rule.anchor(asked))}
        constants = four_six_constants(rule.four_six, asked, case.tile, case.scaling) | top
        if family is KernelKind.FOUR_SIX_TILES:
            del constants["ORDER"]
        return constants
    if family is KernelKind.STATIC:
        sweep = FUSED_SWEEP if isinstance(asked, Sweep) and asked.fused else EAGER_SWEEP
        return {"METHOD": sweep if isinstance(asked, Sweep) else STATIC_FOUR_SIX}
    if family in (KernelKind.OPTIMAL, KernelKind.HESSIAN):
        return {"FIRST": first_scale_byte(rule)}
    return {}


def _is_short(family: KernelKind, rule: NVFP4Rule, pre_scale: object, case: NVFP4Case) -> bool:
    """Whether the short formulas that a kernel has written into it are the rule's: TransformerEngine's."""
    if (
        rule.constant_factor is not None
        or rule.factor is not expressions.clamped_ratio
        or rule.element is not expressions.times_clamped_reciprocal
        or rule.rounding != Rounding()
        or rule.scale_byte != ScaleByte()
        or rule.anchor(case.method) not in SHORT_TOPS
    ):
        return False
    if family is KernelKind.PLAIN:
        return pre_scale is expressions.folded_sixth
    if family is KernelKind.OPTIMAL:  # its estimates take y for x'/s'
        return any(rule.stored is stored and rule.multiplier is multiplier for stored, multiplier in UNDOING)
    if family is KernelKind.FOUR_SIX and rule.four_six is not None and isinstance(case.asked, FourSix):
        in_order = case.tile[0] != 1 or rule.four_six.block_sum is reductions.sequential
        return pre_scale is expressions.divided_then_factor and in_order and case.asked.error in ("mae", "mse")
    return False


def _reads_amax(family: KernelKind, rule: NVFP4Rule, pre_scale: object, case: NVFP4Case) -> bool:
    """Whether the operand's amax has to be known: not where a factor is given and no formula looks further."""
    if rule.constant_factor is None or family is KernelKind.STATIC:
        return True
    read: list[object] = [rule.stored, pre_scale]
    if isinstance(case.asked, FourSix) and rule.four_six is not None:
        read.append(four_six_error(rule.four_six, case.asked, case.scaling))
    return any(number_of(AMAX_READERS, slot) is not None for slot in read)


def _table(family: KernelKind, short: bool, constants: Constants, case: NVFP4Case) -> str | None:
    """The CUDA C++ kernel that can serve: blocks of 16 in one row; for bfloat16 one with tables.

    4over6 has TransformerEngine's formulas in it. The search takes any formulas, and asks on the device whether its
    estimates describe them; what it needs to know before is how to find a code's sign, and that no scale it compares is
    too small for the contract.
    """
    if case.tile != (1, 16):
        return None
    if family is KernelKind.FOUR_SIX:
        return None if not short else "four_six" if case.dtype == "bf16" else "four_six_estimate"
    signed_by_y = constants["SIGN"] in (SIGNS.index("y < 0"), SIGNS.index("sign bit"))
    if family is not KernelKind.OPTIMAL or case.asked != "optimal" or constants["FIRST"] > LARGEST_FIRST:
        return None
    if not (signed_by_y or constants["ZERO_INPUT"]):
        return None
    return {"bf16": "optimal", "fp16": "estimate_halves", "fp32": "estimate"}[case.dtype]


# --- MX ---


def _choose_mx(
    rule: MXRule, format: BlockFormat, asked: Method | Search, tile: Tile, dtype: str
) -> ChosenKernel | Reason:
    reason = (
        format_reason(format, MX_BLOCKS)
        or operand_reason(format, tile, "tensor", dtype)
        or mx_reason(rule, format)
        or (Reason("no GPU kernel has tiles of several rows with power-of-two scales") if tile[0] != 1 else None)
    )
    if reason is not None:
        return reason
    constants: Constants = {
        "N": format.block,
        "DTYPE": DTYPE_NUMBERS[dtype],
        "WIDE": format.element != E2M1,
        "NEAREST": rule.nearest is not None,
        "ROUNDED": rule.rounds_quotient and rule.statistics == "input",
        **rounding_constants(rule.rounding, format.element),
    }
    if isinstance(asked, Method):
        known = type(asked) is Amax
        return (
            ChosenKernel(KernelKind.MX, rule, constants, short=_is_short_mx(rule, format, dtype))
            if known
            else Reason(f"method {asked.name} has no GPU kernel here")
        )
    if rule.scale_search is None:
        short = asked == "optimal" and _is_short_mx(rule, format, dtype)
        return ChosenKernel(KernelKind.MX_OPTIMAL if short else KernelKind.MX_SEARCH, rule, constants)
    if format.element != E2M1:
        return Reason("the kernel of qwantize's search has E2M1 elements")
    return qwantize_reason(rule, asked) or ChosenKernel(KernelKind.MX_QWANTIZE, rule, constants)


def _is_short_mx(rule: MXRule, format: BlockFormat, dtype: str) -> bool:
    """Whether the short way to E2M1 codes is the rule's."""
    rounding = rule.rounding
    even = rounding.tie == "even" or (dtype != "fp32" and number_of(MX_SCALES, rule.scale) is not None)
    return (
        format.element == E2M1 and rule.nearest is None and even and (rounding.zero_input or rounding.sign != "y <= 0")
    )


# --- decoding ---


def choose_decoder(request: Request) -> Decoder | Reason:
    """How a request is decoded, or the reason why no kernel does it."""
    contract, method = request.contract, request.method
    if type(contract) is not Contract:
        return Reason(f"no GPU kernel knows contracts of class {type(contract).__name__}")
    if type(method) not in METHODS:
        return _choose_decoder.__wrapped__(request.format, contract, method)
    asked = method if type(method) in PLAIN_METHODS else REPRESENTATIVE
    try:
        return _choose_decoder(request.format, contract, asked)
    except TypeError:  # as in choose
        return _choose_decoder.__wrapped__(request.format, contract, asked)


@functools.lru_cache(maxsize=512)
def _choose_decoder(format: BlockFormat, contract: Contract, method: Method) -> Decoder | Reason:
    """The method matters for c alone, and any class of method will do."""
    rule = contract.rules.get(format.name)
    if rule is None or type(rule) not in (NVFP4Rule, MXRule, DecodeRule):
        return Reason(f"contract {contract.name} has no rule for {format.name} that a GPU kernel knows")
    if (reason := decoding_reason(rule, format)) is not None:
        return reason
    wide, negative_zero = format.element != E2M1, bool(rule.negative_zero)
    if not isinstance(rule, NVFP4Rule):
        return Decoder(None, 0.0, wide, negative_zero)
    serving = rule.for_method(method)
    top = float(serving.anchor(method))
    if type(serving) is not NVFP4Rule or not 0 < top < LARGEST_TOP:
        return Reason(f"the decoding kernel takes a c = element_max·e4m3_max up to {LARGEST_TOP}, not {top:g}")
    reason = exact_search_reason(rule) if method is REPRESENTATIVE else None
    return reason or Decoder(number_of(DECODES, rule.decode), top, wide, negative_zero)
