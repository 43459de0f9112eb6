"""Which kernel serves a request: an explicit list. A request that is not in the list gets a reason, never a guess.

A kernel replaces the formulas of a contract by its own numbers and tables. So it can serve only the formulas,
roundings, blocks and methods that it was written for; served.py lists them. Tests invent formats, contracts and methods
at random and compare every answer with the bytes of the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from halfbyte.backends.cpu.library import load_library
from halfbyte.backends.cpu.served import (
    DECODING,
    E4M3_MAXES,
    ELEMENT_MAXES,
    ENCODING,
    FOR_ZERO,
    FOR_ZERO_BYTE,
    MX_ELEMENTS,
    NAN_AT_ZERO,
    POWERS_OF_TWO,
    SATURATING,
    SINGLE_LEVEL,
    SMALLEST_SCALES,
)
from halfbyte.backends.cpu.tables_mx import element_number
from halfbyte.backends.numbering import DTYPE_NUMBERS, ERRORS, SIGNS, TIES, exponent_rule
from halfbyte.backends.protocol import Reason
from halfbyte.contracts import MXRule, NVFP4Rule, exponents, expressions, reductions
from halfbyte.contracts.arithmetic import four_six_error
from halfbyte.contracts.peers.gguf import first_nearest
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import search_block_amax
from halfbyte.contracts.spec import DecodeRule, FourSixRule, Rounding, ScaleByte
from halfbyte.formats import E2M1, E4M3, E8M0, BlockFormat
from halfbyte.methods import Amax, FourSix, Hessian, Optimal, Sweep
from halfbyte.request import Request


class Kernel(Enum):
    """The kernels. Each has a function in the module of the same name."""

    PLAIN_BLOCKS = "plain.blocks"
    PLAIN_TILES = "plain.tiles"
    PLAIN_ROWS = "plain.rows"
    FOUR_SIX_BLOCKS = "four_six.blocks"
    FOUR_SIX_TILES = "four_six.tiles"
    FOUR_SIX_ROWS = "four_six.rows"
    FOUR_SIX_ORDERED = "four_six.ordered"
    EXACT_BLOCKS = "exact.blocks"
    EXACT_ROWS = "exact.rows"
    EXACT_GENERAL = "exact.general"
    STATIC_SEARCH = "peer_searches.static"
    QWANTIZE_SEARCH = "peer_searches.nvfp4_by_qwantize"
    MX_BLOCKS = "mx.blocks"
    MX_EXACT = "mx.exact"
    MX_HESSIAN = "mx.through_hessians"
    MX_QWANTIZE_SEARCH = "mx.by_qwantize"


_ANSWERS: dict[tuple[object, ...], tuple[Request, Kernel | Reason]] = {}
MOST_ANSWERS = 256


def choose(request: Request) -> Kernel | Reason:
    """The kernel that quantizes a request, or why there is none.

    Answers are kept by the identity of format, contract and method, which the kept request holds on to. Methods with
    arrays are not kept, so that their memory goes with them.
    """
    if load_library() is None:
        return Reason("the compiled kernels are not installed")
    format, contract, method = request.format, request.contract, request.method
    key = (id(format), id(contract), id(method), request.tile, request.scaling, request.dtype)
    if (kept := _ANSWERS.get(key)) is not None:
        return kept[1]
    answer = _choose(request)
    if type(method) in (Amax, FourSix, Sweep) or (type(method) is Optimal and method.weights is None):
        if len(_ANSWERS) >= MOST_ANSWERS:
            _ANSWERS.clear()
        _ANSWERS[key] = (request, answer)
    return answer


def _choose(request: Request) -> Kernel | Reason:
    if request.dtype not in DTYPE_NUMBERS:
        return Reason(f"its kernels take bf16, fp16 and fp32, not {request.dtype}")
    if type(request.format) is not BlockFormat:
        return Reason(f"it has no kernel for formats of type {type(request.format).__name__}")
    rule = request.rule
    if type(rule) is NVFP4Rule:
        return _unserved_nvfp4(request, rule) or _choose_nvfp4(request, rule)
    if type(rule) is MXRule:
        return _unserved_mx(request, rule) or _choose_mx(request, rule)
    return Reason(f"it has no kernel for rules of type {type(rule).__name__}")


def choose_decoder(request: Request) -> Reason | None:
    """The reason why no kernel decodes a request; None if one does. The contract itself fills the table of values."""
    if load_library() is None:
        return Reason("the compiled kernels are not installed")
    format = request.format
    if type(request.contract.rule(format)) not in (NVFP4Rule, MXRule, DecodeRule):
        return Reason(f"it decodes no rules of type {type(request.rule).__name__}")
    if (format.element == E2M1 and format.block in (16, 32)) or (format.element == E4M3 and format.block == 32):
        return None
    return Reason(f"it decodes e2m1 in blocks of 16 or 32 and e4m3 in blocks of 32, not {_words(request)}")


# --- NVFP4 ---


def _unserved_nvfp4(request: Request, rule: NVFP4Rule) -> Reason | None:
    """The reason why no NVFP4 kernel serves the request under any method; None if one may."""
    if request.format.element != E2M1 or request.format.scale != E4M3 or request.format.block not in (16, 32):
        return Reason(f"its kernels take e2m1 under e4m3 scales in blocks of 16 or 32, not {_words(request)}")
    if request.tile not in ((1, request.format.block), (16, 16)) or request.scaling not in ("tensor", "row"):
        return Reason(f"no kernel was written for tiles of {request.tile} with scaling {request.scaling!r}")
    return _unserved_formulas(rule) or _unserved_numbers(rule)


def _unserved_formulas(rule: NVFP4Rule) -> Reason | None:
    kind = next((kind for kind in (ENCODING, DECODING, SINGLE_LEVEL) if rule.factor in kind.factors), None)
    if kind is None:
        return _unknown("tensor-level formula", rule.factor)
    if rule.pre_scale not in kind.pre_scales:
        return _unknown("scale formula", rule.pre_scale)
    if rule.element not in kind.elements:
        return _unknown("element formula", rule.element)
    if (rule.stored, rule.multiplier) not in kind.stored:
        return _unknown("way of storing the tensor scale", rule.stored or rule.multiplier)
    given = rule.constant_factor is not None
    if given and (kind is not ENCODING or rule.stored is not expressions.store_factor):
        return Reason("a global_scale given by the caller is compiled only for contracts that store an encode factor")
    return None


def _unserved_numbers(rule: NVFP4Rule) -> Reason | None:
    policy, rounding = rule.scale_byte, rule.rounding
    if rule.element_max not in ELEMENT_MAXES or rule.e4m3_max not in E4M3_MAXES:
        return Reason(f"no kernel was written for tensor amaxes scaled to {rule.element_max} times {rule.e4m3_max}")
    if rule.statistics not in ("input", "fp32"):
        return Reason(f"no kernel was written for statistics in {rule.statistics!r}")
    zeros = policy.for_zero in FOR_ZERO and policy.for_zero_byte in FOR_ZERO_BYTE
    if type(policy) is not ScaleByte or policy.smallest not in SMALLEST_SCALES or not zeros:
        return Reason(f"no kernel was written for {policy}")
    known = type(rounding) is Rounding and rounding.tie in TIES and rounding.sign in SIGNS
    if not known or rounding.nan_code not in range(8):
        return Reason(f"no kernel was written for {rounding}")
    as_fouroversix = rounding == Rounding(wraps=True) and rule.element is expressions.times_reciprocal_or_zero
    if rounding.wraps and not as_fouroversix:
        return Reason("codes that wrap are compiled for fouroversix's own rounding and element formula")
    return None


def _choose_nvfp4(request: Request, rule: NVFP4Rule) -> Kernel | Reason:
    method, kind = request.method, type(request.method)
    takes_four_six = isinstance(method, FourSix) and rule.four_six is not None  # 4over6 goes before a peer's own search
    if rule.block_search is not None and method in rule.searches and not takes_four_six:
        return _choose_static(request, rule)
    if request.scaling == "row" and not _is_transformer_engine(rule):
        return Reason("row scaling is compiled only for TransformerEngine's formulas")
    if kind is FourSix:
        return _choose_four_six(request, rule)
    if kind is Optimal or kind is Hessian:
        return _choose_exact(request, rule)
    if kind is not Amax:
        return _unknown("method", kind)
    if request.scaling == "row":
        return Kernel.PLAIN_ROWS
    return Kernel.PLAIN_BLOCKS if request.tile[0] == 1 else Kernel.PLAIN_TILES


def _choose_static(request: Request, rule: NVFP4Rule) -> Kernel | Reason:
    if rule.block_search is not search_block_amax:
        return _unknown("search", rule.block_search)
    if type(request.method) not in (FourSix, Sweep):
        return _unknown("method", type(request.method))
    formulas = rule.pre_scale is expressions.static_scale and rule.element is expressions.over_scale_product
    one_scale = request.tile[0] == 1 and request.scaling == "tensor"
    if not (formulas and one_scale and rule.scale_byte == ScaleByte(smallest=2.0**-9) and rule.element_max == 6):
        return Reason("static weights are compiled for Model-Optimizer's own formulas in blocks of one row")
    return Kernel.STATIC_SEARCH


def _choose_four_six(request: Request, rule: NVFP4Rule) -> Kernel | Reason:
    four_six, method = rule.four_six, request.method
    if type(four_six) is not FourSixRule or type(method) is not FourSix:
        return Reason("this contract has no 4over6")
    error = four_six_error(four_six, method, request.scaling)
    tiled = request.tile[0] != 1
    if rule.rounding.wraps:
        formulas = (
            rule.factor is expressions.ratio
            and four_six.pre_scale is expressions.divided_then_factor_or_zero
            and rule.element is expressions.times_reciprocal_or_zero
            and error is expressions.error_by_amax
        )
        sums = (
            four_six.tile_sum is reductions.eight_lanes_flat if tiled else four_six.block_sum is reductions.eight_lanes
        )
        if not (formulas and sums and rule.scale_byte == ScaleByte() and rule.element_max == 6):
            return Reason("4over6 with codes that wrap is compiled for fouroversix's own formulas and sums")
        return Kernel.FOUR_SIX_ORDERED if request.scaling == "tensor" else Reason("codes that wrap have no row scaling")
    formulas = (
        rule.factor is expressions.clamped_ratio
        and four_six.pre_scale is expressions.divided_then_factor
        and rule.element is expressions.times_clamped_reciprocal
        and error in ERRORS
        and rule.rounding == Rounding()
        and rule.scale_byte == ScaleByte()
        and rule.element_max == 6
    )
    if not formulas or method.error not in ("mae", "mse"):
        return Reason("4over6 is compiled for TransformerEngine's formulas, with absolute or squared errors")
    if tiled:
        fits = four_six.tile_sum is reductions.rows_then_tree and request.format.block == 16
        return Kernel.FOUR_SIX_TILES if fits else Reason("4over6 on tiles is compiled for sums of rows, then a tree")
    if four_six.block_sum is not reductions.sequential:
        return _unknown("order of 4over6's sums", four_six.block_sum)
    if request.format.block != 16:
        return Kernel.FOUR_SIX_ORDERED
    return Kernel.FOUR_SIX_ROWS if request.scaling == "row" else Kernel.FOUR_SIX_BLOCKS


def _choose_exact(request: Request, rule: NVFP4Rule) -> Kernel | Reason:
    if rule.scale_search is not None:
        unserved = _unserved_scale_search(request, rule, search_e4m3)
        return unserved or Kernel.QWANTIZE_SEARCH
    if request.tile[0] != 1:
        return Reason("its exact searches take blocks of one row")
    if (
        rule.element in NAN_AT_ZERO
        and rule.scale_byte == ScaleByte()
        and rule.rounding.nan_code
        and not rule.rounding.zero_input
    ):
        return Reason("its exact searches write code 0 for the elements of a zero block, which are 0/0 here")
    method = request.method
    if request.format.block != 16 or rule.rounding.wraps:
        return Kernel.EXACT_GENERAL
    if request.scaling == "row":
        plain = isinstance(method, Optimal) and method.channel_weights is None
        return Kernel.EXACT_ROWS if plain else Kernel.EXACT_GENERAL
    return Kernel.EXACT_BLOCKS if rule.rounding.tie == "even" or request.dtype != "fp32" else Kernel.EXACT_GENERAL


def _is_transformer_engine(rule: NVFP4Rule) -> bool:
    """True if the rule has the formulas of the kernels for one global scale per row."""
    return (
        rule.factor is expressions.clamped_ratio
        and rule.pre_scale is expressions.folded_sixth
        and rule.element is expressions.times_clamped_reciprocal
        and rule.rounding == Rounding()
        and rule.scale_byte == ScaleByte()
        and rule.element_max == 6
    )


def _unserved_scale_search(request: Request, rule: NVFP4Rule | MXRule, search: Callable[..., object]) -> Reason | None:
    """The reason why a peer's own scale search has no kernel; None if it has one."""
    method = request.method
    if rule.scale_search is not search:
        return _unknown("search", rule.scale_search)
    if isinstance(rule, NVFP4Rule) and (rule.factor is not expressions.no_factor or request.tile[0] != 1):
        return Reason("qwantize's search is compiled for one level of scales and blocks of one row")
    if isinstance(rule, MXRule) and rule.scale is not exponents.floor_log2_floored:
        return Reason("qwantize's search is compiled for its own exponent rule")
    if isinstance(method, Optimal) and method.weights is not None:
        return Reason("qwantize's search knows no weights")
    if isinstance(method, Hessian) and method.codes != "nearest":
        return Reason(f"qwantize's search has no codes={method.codes!r}")
    return None


# --- MX ---


def _unserved_mx(request: Request, rule: MXRule) -> Reason | None:
    """The reason why no MX kernel serves the request under any method; None if one may."""
    format, rounding = request.format, rule.rounding
    narrow = format.element == E2M1 and format.block in (16, 32)
    wide = format.element == E4M3 and format.block == 32
    if format.scale != E8M0 or not (narrow or wide):
        return Reason(f"its kernels take e2m1 in blocks of 16 or 32 and e4m3 in blocks of 32, not {_words(request)}")
    if request.tile != (1, format.block) or request.scaling != "tensor":
        return Reason(f"no kernel was written for tiles of {request.tile} with scaling {request.scaling!r}")
    scale = exponent_rule(rule.scale)
    if scale is None:
        return _unknown("exponent rule", rule.scale)
    if rule.element not in MX_ELEMENTS:
        return _unknown("element formula", rule.element)
    if rule.nearest not in (None, first_nearest):
        return _unknown("way to the nearest code", rule.nearest)
    if rule.statistics not in ("input", "fp32") or rounding.wraps or rounding.tie not in TIES:
        return Reason(f"no kernel was written for {rounding} with statistics in {rule.statistics!r}")
    if type(rounding) is not Rounding or rounding.sign not in SIGNS or rounding.nan_code not in range(8):
        return Reason(f"no kernel was written for {rounding}")
    if not wide:
        return None
    plain = rule.element in (exponents.over, exponents.times_reciprocal) and rule.nearest is None
    rounds = (rounding.tie, rounding.sign, rounding.zero_input) == (SATURATING.tie, SATURATING.sign, False)
    if not (plain and rounds) or rule.rounds_quotient or scale not in POWERS_OF_TWO:
        return Reason("e4m3 elements are compiled only for x / power of two, nearest even, with the sign bit of x")
    return None


def _choose_mx(request: Request, rule: MXRule) -> Kernel | Reason:
    kind = type(request.method)
    if kind is Amax:
        return Kernel.MX_BLOCKS
    if kind is not Optimal and kind is not Hessian:
        return _unknown("method", kind)
    if rule.scale_search is not None:
        return _unserved_scale_search(request, rule, search_e8m0) or Kernel.MX_QWANTIZE_SEARCH
    if element_number(rule, request.format.element, request.dtype) is None:
        return Reason(f"its exact search of {request.format.name} takes contracts that round to the nearest code")
    return Kernel.MX_EXACT if kind is Optimal else Kernel.MX_HESSIAN


# --- words ---


def _unknown(what: str, found: object) -> Reason:
    name = getattr(found, "__name__", None) or repr(found)
    return Reason(f"no kernel was written for the {what} {name}")


def _words(request: Request) -> str:
    format = request.format
    return f"{format.element.name} under {format.scale.name} in blocks of {format.block}"
