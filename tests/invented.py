"""Formats, contracts and methods invented at random. Every backend must give the reference's bytes for them, or refuse.

`draw(seed)` gives one case. About half of the cases only mix slots of existing contracts, so kernels can serve them.
The others have a change that no kernel knows. The reference accepts all of them: it computes them, or raises a
HalfbyteError. This module needs only numpy and halfbyte.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from halfbyte.codec.bits import DTYPES, F32
from halfbyte.contracts import CONTRACTS, Contract, MXRule, NVFP4Rule, exponents, flashinfer, reductions
from halfbyte.contracts.peers.flashinfer import ue8m0_rule
from halfbyte.contracts.peers.gguf import decode_scale_halved, first_nearest
from halfbyte.contracts.searches.qwantize import search_e4m3, search_e8m0
from halfbyte.contracts.searches.static import search_block_amax
from halfbyte.contracts.spec import FourSixRule, Rounding, ScaleByte, Scaling, Tile, Transform
from halfbyte.formats import E2M1, E4M3, E8M0, BlockFormat, ElementFormat
from halfbyte.methods import Method
from halfbyte.methods.four_six import BlockError
from tests import invented_slots as slots

T = TypeVar("T")
Draw = np.random.Generator
Rule = NVFP4Rule | MXRule

ELEMENTS = [
    ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3),
    ElementFormat(name="e2m3", exponent_bits=2, mantissa_bits=3, bias=1),
    ElementFormat(name="e3m0", exponent_bits=3, mantissa_bits=0, bias=3),
    ElementFormat(name="e1m2", exponent_bits=1, mantissa_bits=2, bias=1),
    ElementFormat(name="e2m2", exponent_bits=2, mantissa_bits=2, bias=1),
    ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=2),  # half of E2M1's values, same name
    ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=1, has_nan=True),
    ElementFormat(name="ue2m2", exponent_bits=2, mantissa_bits=2, bias=1, signed=False),
    ElementFormat(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, has_nan=True),
    ElementFormat(name="e4m3", exponent_bits=4, mantissa_bits=3, bias=7),  # E4M3 without NaN
    E4M3,
    E2M1,
]
SCALES = [E4M3, E8M0, ElementFormat(name="e5m3", exponent_bits=5, mantissa_bits=3, bias=15, signed=False)]
BLOCKS = (8, 16, 24, 32, 64)
ALL_BYTES = 127
"""The number of E4M3 bytes that are zero or positive numbers; also the first byte that is not."""


@dataclass(frozen=True, eq=False)
class Invented:
    """One case: a matrix, and how to quantize it."""

    seed: int
    format: BlockFormat
    contract: Contract
    method: Method
    tile: Tile
    scaling: Scaling
    dtype: str
    x: npt.NDArray[Any]

    def __str__(self) -> str:
        rule = self.contract.rules[self.format.name]
        parts = [f"{slot.name}={_label(getattr(rule, slot.name))}" for slot in dataclasses.fields(rule)]
        format = f"{self.format.name}: {self.format.element} scale {self.format.scale.name} block {self.format.block}"
        method = f"{type(self.method).__name__} {_label(self.method)}"
        where = f"tile {self.tile} scaling {self.scaling} {self.dtype} {self.x.shape} {self.contract.transform}"
        return f"seed {self.seed}\n  {format}\n  {method}\n  {where}\n  " + "\n  ".join(parts)

    def quantize(self, backend: str, x: Any = None) -> hb.QuantizedTensor:
        """Quantize the matrix, or `x`, which holds the same values in another kind of array."""
        return hb.quantize(
            self.x if x is None else x, self.format, self.contract, self.method, tile=self.tile, scaling=self.scaling,
            backend=backend,
        )  # fmt: skip


def _label(value: object) -> str:
    if isinstance(value, functools.partial):
        return f"{value.func.__name__}{value.keywords}"
    if isinstance(value, hb.Optimal | hb.Hessian):
        kind = getattr(value, "codes", "plain" if getattr(value, "weights", None) is None else "weighted")
        return f"{value.name} {kind}"
    if isinstance(value, FourSixRule):
        return (
            f"({', '.join(f'{part.name}={_label(getattr(value, part.name))}' for part in dataclasses.fields(value))})"
        )
    return str(getattr(value, "__name__", value))


def draw(seed: int) -> Invented:
    """The case of a seed."""
    rng = np.random.default_rng(seed)
    two_level = rng.random() < 0.65
    format = _format(rng, two_level)
    rule: Rule = _nvfp4_rule(rng) if two_level else _mx_rule(rng)
    for _ in range(_pick(rng, (0, 0, 0, 1, 1, 2))):
        rule = _twisted_nvfp4(rule, rng) if isinstance(rule, NVFP4Rule) else _twisted_mx(rule, rng)
    hadamard = bool(rng.random() < 0.05)
    contract = Contract(
        name="invented",
        source="tests/invented.py",
        rules={format.name: rule},
        ragged="pad" if rng.random() < 0.5 else "refuse",
        transform=Transform(hadamard and bool(rng.random() < 0.5), hadamard, bool(rng.random() < 0.5)),
    )
    rows, columns = (
        int(rng.integers(1, 6)),
        format.block * int(rng.integers(1, 1 + max(1, min(3, 128 // format.block)))),
    )
    method = _method(rng, rule, format, columns)
    tile, scaling = _tile_and_scaling(rng, rule, format, method)
    dtype = _pick(rng, tuple(DTYPES))
    if hadamard:  # groups of sixteen along the block axis, which may be the first axis
        columns, rows = -(-columns // 16) * 16, (16 if contract.transform.columnwise else rows)
    elif contract.ragged == "pad" and type(method) in (hb.Amax, hb.FourSix) and rng.random() < 0.3:
        columns = max(1, columns - int(rng.integers(1, 8)))
    return Invented(seed, format, contract, method, tile, scaling, dtype, _values(rng, rows, columns, dtype))


def _pick(rng: Draw, among: Sequence[T]) -> T:
    return among[int(rng.integers(len(among)))]


def _tile_and_scaling(rng: Draw, rule: Rule, format: BlockFormat, method: Method) -> tuple[Tile, Scaling]:
    plain: Tile = (1, format.block)
    if not isinstance(rule, NVFP4Rule):
        return plain, "tensor"
    if rule.row_scaling and rule.stored is not None and rng.random() < 0.5:
        return plain, "row"
    adds = not isinstance(method, hb.FourSix) or rule.four_six is None or rule.four_six.tile_sum is not None
    fits = adds and (not isinstance(method, hb.Optimal | hb.Hessian) or rng.random() < 0.1)
    if fits and len(rule.tiles) > 1 and rng.random() < 0.7:
        return rule.tiles[-1], "tensor"
    return plain, "tensor"


# --- formats ---


def _format(rng: Draw, two_level: bool) -> BlockFormat:
    """Half of the formats are the project's own; the others have another element, scale, block length or name."""
    names = ["nvfp4"] if two_level else ["mxfp4", "mxfp4", "mxfp8"]
    format = hb.get_format(_pick(rng, names))
    if rng.random() < 0.2:
        format = hb.get_format(format, _pick(rng, format.blocks))
    if rng.random() < 0.65:
        return format
    changes: dict[str, Any] = {}
    if rng.random() < 0.5:
        changes["block"] = _pick(rng, BLOCKS)
    if rng.random() < 0.4:
        changes["element"] = _pick(rng, ELEMENTS)
    if rng.random() < 0.2:
        changes["scale"] = _pick(rng, SCALES)
    if rng.random() < 0.15:
        changes["has_global"] = not format.has_global
    if rng.random() < 0.3:
        changes["name"] = _pick(rng, ("mine", "nvfp4", "mxfp4"))
    return dataclasses.replace(format, **changes)


# --- rules ---


@functools.cache
def _contracts() -> list[Contract]:
    made = [make() for make in CONTRACTS.values()]
    made += [hb.contracts.modelopt(mode="max"), hb.contracts.torchao(two_level=False)]
    made += [hb.contracts.compressed_tensors(minmax="fp32"), hb.contracts.fouroversix(rule="static_4")]
    made += [hb.contracts.qwantize(mode=f"{name}/optimal") for name in ("nvfp4", "mxfp4")]
    made += [hb.contracts.torchao(mode="mx", scaling_mode=mode) for mode in ("even", "ceil", "rceil")]
    made += [flashinfer(mode="te"), flashinfer(mode="4over6"), hb.contracts.vllm(global_scale=3.0)]
    return made


def _known(kind: type[T]) -> list[T]:
    """All rules of this type in the project's contracts."""
    return [rule for contract in _contracts() for rule in contract.rules.values() if isinstance(rule, kind)]


def _four_six(rng: Draw) -> FourSixRule:
    known = [rule.four_six for rule in _known(NVFP4Rule) if rule.four_six is not None]
    changes: dict[str, Any] = {"errors": get_args(BlockError), "e4m3_maxes": (448, 256)}
    if rng.random() < 0.5:
        changes |= {
            "pre_scale": _pick(rng, slots.PRE_SCALES),
            "exact_error": _pick(rng, slots.ERRORS),
            "fast_error": _pick(rng, (None, *slots.ERRORS)),
            "exact_row_error": _pick(rng, (None, *slots.ERRORS)),
            "block_sum": _pick(rng, (reductions.sequential, reductions.eight_lanes)),
            "tile_sum": _pick(rng, (reductions.rows_then_tree, reductions.eight_lanes_flat)),
        }
    return dataclasses.replace(_pick(rng, known), **changes)


def _rounding(rng: Draw) -> Rounding:
    return Rounding(
        tie=_pick(rng, ("even", "even", "down")),
        sign=_pick(rng, slots.SIGNS),  # type: ignore[arg-type]
        nan_code=int(rng.integers(8)),
        zero_input=bool(rng.random() < 0.3),
        wraps=bool(rng.random() < 0.2),
    )


def _scale_byte(rng: Draw) -> ScaleByte:
    return ScaleByte(
        smallest=float(_pick(rng, (0.0, 0.0, 2.0**-9, 2.0**-6, 0.3, 1.7, 448.0))),
        for_zero=_pick(rng, (None, None, 1.0, 0.0, 0.003, 1e-40)),
        for_zero_byte=_pick(rng, (None, None, 0x20, 1, 0x38, 126)),
    )


def _nvfp4_rule(rng: Draw) -> NVFP4Rule:
    """A known rule. None, some or all of its slots are replaced by those of other rules."""
    rule = _pick(rng, _known(NVFP4Rule))
    choices: dict[str, Callable[[], Any]] = {
        "factor": lambda: _pick(rng, slots.FACTORS),
        "pre_scale": lambda: _pick(rng, slots.PRE_SCALES),
        "scale_byte": lambda: _scale_byte(rng),
        "element": lambda: _pick(rng, slots.DIVIDING if rng.random() < 0.4 else slots.MULTIPLYING),
        "rounding": lambda: _rounding(rng),
        "stored": lambda: _pick(rng, slots.STORED),
        "multiplier": lambda: _pick(rng, slots.MULTIPLIERS),
        "decode": lambda: _pick(rng, slots.DECODES),
        "statistics": lambda: _pick(rng, ("input", "fp32")),
        "four_six": lambda: _four_six(rng),
        "negative_zero": lambda: bool(rng.random() < 0.5),
        "constant_factor": lambda: _pick(rng, (None, np.float32(2.0), np.float32(448.0), np.float32(1e-3))),
        "row_scaling": lambda: True,
        "tiles": lambda: ((1, 16), (16, 16)),
    }
    share = _pick(rng, (0.0, 0.15, 0.3, 1.0))
    return dataclasses.replace(rule, **{name: make() for name, make in choices.items() if rng.random() < share})


def _mx_rule(rng: Draw) -> MXRule:
    rule = _pick(rng, _known(MXRule))
    choices: dict[str, Callable[[], Any]] = {
        "scale": lambda: _pick(rng, slots.MX_SCALES),
        "element": lambda: _pick(rng, slots.MX_ELEMENTS),
        "rounding": lambda: _rounding(rng),
        "decode": lambda: _pick(rng, (exponents.decode_e8m0, exponents.decode_power)),
        "statistics": lambda: _pick(rng, ("input", "fp32")),
        "rounds_quotient": lambda: bool(rng.random() < 0.5),
        "nearest": lambda: _pick(rng, (None, None, first_nearest)),
        "negative_zero": lambda: bool(rng.random() < 0.5),
        "blocks": lambda: None,
    }
    share = _pick(rng, (0.0, 0.2, 1.0))
    rule = dataclasses.replace(rule, **{name: make() for name, make in choices.items() if rng.random() < share})
    if rng.random() < 0.1:
        factor = float(np.float32(2.0 ** rng.uniform(-140, 127)))
        rule = dataclasses.replace(rule, scale=ue8m0_rule(factor).scale)
    return rule


# --- twists ---


def _twisted_nvfp4(rule: NVFP4Rule, rng: Draw) -> NVFP4Rule:
    """The rule with one slot that no kernel was written for."""
    four_six = rule.four_six or _four_six(rng)
    twists: list[dict[str, Any]] = [
        {"factor": slots.halved_ratio},
        {"pre_scale": slots.factor_first},
        {"pre_scale": slots.divided_by_five},
        {"element": slots.over_scale_then_factor},
        {"element": slots.over_scale_nudged},
        {"element": slots.factor_then_over_scale},
        {"element": slots.times_factor_over_scale},
        {"stored": slots.store_doubled},
        {"multiplier": slots.half_of_stored},
        {"decode": slots.decode_from_the_left},
        {"rounding": dataclasses.replace(rule.rounding, tie="up")},
        {"scale_byte": dataclasses.replace(rule.scale_byte, for_zero_byte=int(rng.integers(ALL_BYTES + 1)))},
        {"scale_byte": ScaleByte(smallest=float(2.0 ** rng.uniform(-12, 9)))},
        {"scale_byte": ScaleByte(for_zero=float(2.0 ** rng.uniform(-12, 9)))},
        {"element_max": int(rng.integers(1, 9))},
        {"e4m3_max": int(rng.integers(1, 600))},
        {"constant_factor": np.float32(2.0 ** rng.uniform(-140, 127))},
        {"four_six": dataclasses.replace(four_six, pre_scale=slots.factor_first)},
        {"four_six": dataclasses.replace(four_six, exact_error=slots.error_of_decoded)},
        {"four_six": dataclasses.replace(four_six, block_sum=slots.from_the_end)},
        {"four_six": dataclasses.replace(four_six, tile_sum=slots.columns_then_rows), "tiles": ((1, 16), (16, 16))},
        {"tiles": ((1, 16), _pick(rng, ((4, 16), (8, 16), (16, 32), (16, 8))))},
        {
            "block_search": slots.shrunk_amax,
            "searches": (slots.Percentile(), hb.Sweep(), slots.OtherAmax()),
            "four_six": None,
        },
        {"block_search": search_block_amax, "searches": (hb.FourSix("mse", 256), hb.Sweep(), hb.Sweep(True))},
        {"block_search": search_block_amax, "searches": (hb.Amax(), hb.Optimal(), slots.OtherSweep())},
        {"scale_search": search_e4m3},
        {"scale_search": search_e8m0},
        {"scale_search": slots.next_byte},
    ]
    return dataclasses.replace(rule, **_pick(rng, twists))


def _twisted_mx(rule: MXRule, rng: Draw) -> MXRule:
    twists: list[dict[str, Any]] = [
        {"scale": slots.ceil_of_third},
        {"scale": slots.fickle_exponent},
        {"scale": slots.scale_of_three},
        {"element": slots.over_three_quarters},
        {"element": slots.times_reciprocal_nudged},
        {"nearest": slots.always_three},
        {"decode": slots.decode_in_bfloat16},
        {"decode": slots.decode_squared},
        {"decode": decode_scale_halved},
        {"rounding": dataclasses.replace(rule.rounding, tie="up")},
        {"rounding": Rounding(wraps=True)},
        {"blocks": (16,)},
        {"scale_search": search_e8m0},
        {"scale_search": search_e4m3},
        {"scale_search": slots.next_byte},
    ]
    return dataclasses.replace(rule, **_pick(rng, twists))


# --- methods ---


def _hessian(rng: Draw, columns: int, block: int) -> F32:
    """XᵀX of a few activations; one in four also has a negative eigenvalue."""
    shape = (columns // block, int(rng.integers(1, 2 * block)), block)
    x = rng.normal(size=shape) * 2.0 ** rng.integers(-4, 4, (columns // block, 1, block))
    h = np.einsum("ctk,ctl->ckl", x, x)
    if rng.random() < 0.25:  # as far below zero as hb.Hessian takes for rounding
        largest = np.linalg.eigvalsh(h).max(axis=1)
        h -= np.eye(block) * (9e-4 * rng.random() * largest)[:, None, None]
    return np.asarray((h + h.swapaxes(1, 2)) / 2, np.float32)


def _method(rng: Draw, rule: Rule, format: BlockFormat, columns: int) -> Method:
    """A method that the rule defines; sometimes one that it may not define."""
    chance = rng.random()
    if isinstance(rule, NVFP4Rule):
        searches = (rule.search_rule or rule).searches
        if searches and chance < 0.5:
            return _pick(rng, searches)
        if rule.four_six is not None and chance < 0.5:
            kind = slots.OtherFourSix if rng.random() < 0.08 else hb.FourSix
            fast = rule.four_six.fast_error is not None and bool(rng.random() < 0.5)
            return kind(_pick(rng, rule.four_six.errors), _pick(rng, rule.four_six.e4m3_maxes), fast)  # type: ignore[arg-type]
        if rule.scale_search is not None and chance < 0.8:
            small = format.block <= 16 and rng.random() < 0.4
            return hb.Hessian(_hessian(rng, columns, format.block)) if small else hb.Optimal()
    elif rule.scale_search is not None and chance < 0.7:
        return hb.Optimal()
    if chance < 0.78:
        return hb.Amax()
    if chance < 0.93 or format.block > 16:
        weights = rng.random(columns).astype(np.float32) if rng.random() < 0.4 else None
        return _pick(rng, (hb.Optimal, hb.Optimal, hb.Optimal, slots.PlainSubclass, slots.SquaredWeights))(weights)
    if chance < 0.96:
        return _pick(rng, (hb.Hessian, hb.Hessian, slots.Ridge))(_hessian(rng, columns, format.block))
    if chance < 0.975 and format.element.bits == 4:
        return hb.Hessian(_hessian(rng, columns, format.block), codes="descent")
    return _pick(rng, (hb.Sweep(), hb.FourSix(), slots.Percentile(), slots.OtherAmax(), slots.OtherSweep()))


# --- operands ---


@np.errstate(all="ignore")
def _values(rng: Draw, rows: int, columns: int, dtype: str) -> npt.NDArray[Any]:
    """Numbers of many sizes, zeros of both signs, ties; sometimes tiny, huge or non-finite numbers."""
    x = rng.normal(size=(rows, columns)) * 2.0 ** rng.integers(-3, 4, (rows, 1))
    if rng.random() < 0.3:
        x *= 2.0 ** rng.integers(-12, 12, (rows, columns))
    if rng.random() < 0.4:
        ties = rng.integers(-26, 27, (rows, columns)) / 4
        x = np.where(rng.random((rows, columns)) < 0.7, ties, x)
    x = np.where(rng.random((rows, columns)) < 0.05, 0.0, x)
    x = np.where(rng.random((rows, columns)) < 0.03, -0.0, x)
    x[:, : 8 * int(rng.integers(0, columns // 8 + 1))] *= _pick(rng, (1.0, 1.0, 0.0, -0.0, 2.0**-14))
    if rng.random() < 0.2:
        x[int(rng.integers(rows))] = 0
    x *= _pick(rng, (1.0, 1.0, 1.0, 1.0, 1e-3, 300.0, 1e-30, 2.0**-133, 1e30, 1e37, 6e4))
    if rng.random() < 0.12:
        x.flat[int(rng.integers(x.size))] = _pick(rng, (np.nan, np.inf, -np.inf))
    return np.ascontiguousarray(x.astype(np.float32).astype(DTYPES[dtype]))
