"""What a call means: look up names, fill in defaults, and check everything that needs no data.

Only `resolve` and `resolve_decoding` create a `Request`. They compute nothing, so a conversion can plan with them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from halfbyte.contracts import CONTRACTS, Contract, DecodeRule, MXRule, NVFP4Rule, get_contract
from halfbyte.contracts.hadamard import GROUP
from halfbyte.contracts.spec import Rule, Scaling, Tile, defined_methods, with_defaults
from halfbyte.errors import InputError, UnsupportedError, unknown_name
from halfbyte.formats import E2M1, E4M3, E8M0, BlockFormat, get_format
from halfbyte.methods import Amax, FourSix, Method, parse_method

SCALINGS = ("tensor", "row")


class Arguments(NamedTuple):
    """What a caller gives `quantize` besides the tensor, in its order and as it is: nothing is checked yet."""

    format: Any
    contract: Any
    method: Any
    block: Any
    tile: Any
    scaling: Any
    global_amax: Any
    backend: Any
    threads: Any
    out: Any


@dataclass(frozen=True)
class Request:
    """One way to quantize a tensor, checked and with every default filled in. It holds no data."""

    format: BlockFormat
    contract: Contract
    method: Method
    tile: Tile
    scaling: Scaling
    dtype: str
    """Short name of the operand's dtype. Some contracts also hold minima and maxima in this dtype."""
    threads: int | None = None
    """The number of threads; None: the backend chooses. It never changes a bit."""
    device: str = "numpy"
    """Where the operand is: "numpy", or the type of a torch tensor's device ("cpu", "cuda")."""

    @property
    def rule(self) -> Rule:
        """The contract's rule for the format; for NVFP4, the rule that serves the method."""
        rule = self.contract.rule(self.format)
        return rule.for_method(self.method) if isinstance(rule, NVFP4Rule) else rule


def resolve(
    format: str | BlockFormat,
    contract: str | Contract | None = None,
    method: str | Method | None = None,
    *,
    block: int | None = None,
    tile: tuple[int, int] | None = None,
    scaling: Scaling | None = None,
    dtype: str = "fp32",
    threads: int | None = None,
    device: str = "numpy",
) -> Request:
    """The request for the arguments of `quantize`; see there for their meaning.

    Raises if the combination is not defined. `check_shape` checks what depends on the operand's shape.
    """
    block_format = get_format(format, block)
    chosen = get_contract(contract, block_format)
    rule = chosen.rule(block_format)
    _check_scale(rule, chosen, block_format)
    _check_block(rule, chosen, block_format)
    resolved = _resolve_method(method, chosen, rule, block_format)
    scaled = _resolve_scaling(scaling, chosen, rule, block_format)
    tiled = _resolve_tile(tile, chosen, rule, block_format, scaled)
    if resolved.one_row and tiled[0] != 1:
        raise UnsupportedError(f"method {resolved.name} searches blocks of one row; tile {tiled} spans several")
    _check_element(rule, chosen, block_format, resolved)
    return Request(block_format, chosen, resolved, tiled, scaled, dtype, threads, device)


def resolve_decoding(
    format: BlockFormat, contract: Contract, method: Method, threads: int | None = None, device: str = "numpy"
) -> Request:
    """The request for decoding a tensor. Tiles and row scales need no options: the tensor's arrays contain them."""
    _check_scale(contract.rule(format), contract, format)
    return Request(format, contract, method, (1, format.block), "tensor", "fp32", threads, device)


def check_shape(request: Request, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The logical shape of an operand after the contract's transform. Raises if the request cannot take the shape.

    A tensor without rows, such as an empty batch, is fine.
    """
    contract, block = request.contract, request.format.block
    if not shape:
        raise InputError("cannot quantize a tensor of shape (): it has no axis to cut into blocks; give it one first")
    if contract.transform.columnwise:
        shape = (shape[-1], math.prod(shape[:-1]))
    width = shape[-1]
    if width == 0:
        raise InputError(f"cannot quantize a tensor of shape {shape}: the axis to cut into blocks has no elements")
    if contract.transform.hadamard and width % GROUP:
        raise InputError(f"the Hadamard transform needs a block axis that is a multiple of {GROUP}, not {width}")
    if contract.ragged == "refuse" and width % block:
        padding = [name for name, make in CONTRACTS.items() if make().ragged == "pad"]
        raise InputError(
            f"shape {shape}: contract {contract.name} needs a last axis that is a multiple of {block}, not "
            f"{width}; pad the tensor, or choose a contract that pads ({', '.join(padding)})"
        )
    request.method.check_width(width, block)
    return shape


def check_takes_amax(request: Request) -> None:
    """Raise if the caller gave an amax but the contract does not use one."""
    rule = request.contract.rule(request.format)
    if not isinstance(rule, NVFP4Rule) or rule.stored is None:
        raise UnsupportedError(f"{request.format.name} under this contract has no global scale; leave global_amax out")
    if rule.constant_factor is not None:
        raise UnsupportedError("this contract was created with a global_scale; leave global_amax out")


def stores_scale(rule: Rule) -> bool:
    """Whether a contract stores a tensor-level scale with the blocks and needs it to decode."""
    return isinstance(rule, NVFP4Rule) and rule.stored is not None


# --- a rule and a format ---


def _check_scale(rule: Rule, contract: Contract, format: BlockFormat) -> None:
    """Rules are found by the name of a format. Raise if the format differs from the one the rule was written for."""
    scale = E8M0 if isinstance(rule, MXRule) else E4M3 if isinstance(rule, NVFP4Rule) else format.scale
    if format.scale != scale:
        raise UnsupportedError(
            f"contract {contract.name} has {scale.name} scales for {format.name}, not {format.scale.name}; give the "
            "format another name and a contract that defines it"
        )


def _check_block(rule: Rule, contract: Contract, format: BlockFormat) -> None:
    if isinstance(rule, MXRule) and rule.blocks is not None and format.block not in rule.blocks:
        listed = ", ".join(map(str, rule.blocks))
        raise UnsupportedError(f"contract {contract.name} has blocks of {listed}, not {format.block}")


def _check_element(rule: Rule, contract: Contract, format: BlockFormat, method: Method) -> None:
    """Raise if a rule is defined only for E2M1 and the element is another one.

    Such rules take codes from a float's bits, or have a peer's own rounding or search.
    """
    if format.element == E2M1 or isinstance(rule, DecodeRule):
        return
    of_e2m1 = rule.rounding.wraps
    if isinstance(rule, MXRule):
        of_e2m1 |= rule.nearest is not None
    else:
        of_e2m1 |= method in rule.for_method(method).searches
    of_e2m1 |= method.one_row and rule.scale_search is not None
    if of_e2m1:
        raise UnsupportedError(
            f"contract {contract.name} defines method {method.name} for e2m1, not {format.element.name}"
        )


# --- method ---


def _resolve_method(method: str | Method | None, contract: Contract, rule: Rule, format: BlockFormat) -> Method:
    """The method as an instance that this contract defines for this format."""
    if isinstance(rule, DecodeRule):
        raise UnsupportedError(f"contract {contract.name} decodes {format.name} only: it has no quantizer for it")
    if method is None:  # presets such as 4over6 apply only to NVFP4; the contract's MX formats stay plain
        preset_fits = isinstance(rule, NVFP4Rule) or isinstance(contract.method, str) or contract.method.everywhere
        method = contract.method if preset_fits else Amax()
    if isinstance(method, Method) and method.everywhere:
        return method
    if isinstance(method, str):
        kind, given = parse_method(method)
        if kind.needs:
            raise UnsupportedError(f"method {method!r} needs {kind.needs}")
        if kind.everywhere:
            return replace(with_defaults(kind), **given) if given else with_defaults(kind)
        known = defined_methods(rule)
        named = [candidate for candidate in known if isinstance(candidate, kind)]
        if not named:
            raise _undefined(method, kind, contract, format, known)
        if not given:
            return named[0]
        method = replace(named[0], **given)
    if not isinstance(method, Method):
        raise unknown_name("method", method, ["a name", "hb.Amax()", "hb.FourSix(...)", "hb.Optimal(...)"])
    if isinstance(method, FourSix) and isinstance(rule, NVFP4Rule) and rule.four_six is not None:
        four_six = rule.four_six
        if (
            method.error in four_six.errors
            and method.e4m3_max in four_six.e4m3_maxes
            and (four_six.fast_error is not None or not method.fast_error)
        ):
            return method
        errors, maxes = ", ".join(four_six.errors), ", ".join(map(str, four_six.e4m3_maxes))
        fast = "False or True" if four_six.fast_error is not None else "False"
        raise UnsupportedError(
            f"contract {contract.name} has no {method}; it has error {errors}, e4m3_max {maxes}, fast_error {fast}"
        )
    if method.needs:
        raise UnsupportedError(f"method {method.name!r} needs {method.needs}")
    known = defined_methods(rule)
    if method not in known:
        raise _undefined(method.spelling, type(method), contract, format, known)
    return method


def _undefined(
    spelling: str, kind: type[Method], contract: Contract, format: BlockFormat, known: list[Method]
) -> UnsupportedError:
    listed = ", ".join(method.spelling for method in known)
    rules = {name: make().rules.get(format.name) for name, make in CONTRACTS.items()}
    others = [
        name
        for name, rule in rules.items()
        if rule is not None
        and name != contract.name
        and any(isinstance(method, kind) for method in defined_methods(rule))
    ]
    elsewhere = f"; contracts with {kind.name}: {', '.join(others)}" if others else ""
    return UnsupportedError(
        f"contract {contract.name} does not define method {spelling} for {format.name}; it takes {listed}{elsewhere}"
    )


# --- scaling and tile ---


def _resolve_scaling(scaling: Scaling | None, contract: Contract, rule: Rule, format: BlockFormat) -> Scaling:
    if scaling is None:
        scaling = contract.scaling if isinstance(rule, NVFP4Rule) else "tensor"
    if scaling not in SCALINGS:
        raise unknown_name("scaling", scaling, (*SCALINGS, "expert"))
    if scaling == "row":
        if not isinstance(rule, NVFP4Rule):
            raise UnsupportedError(f"{format.name} has no global scale, so scaling='row' has no meaning; leave it out")
        if not rule.row_scaling:
            raise UnsupportedError(
                f"contract {contract.name} has no row scaling here; transformer_engine and flashinfer's modes te and "
                "4over6 have it"
            )
    return scaling


def _resolve_tile(
    tile: tuple[int, int] | None, contract: Contract, rule: Rule, format: BlockFormat, scaling: Scaling
) -> Tile:
    """The tile: one row of a block, or a square tile if the contract has one."""
    if tile is None and isinstance(rule, NVFP4Rule):
        tile = contract.tile
    plain = (1, format.block)
    if tile is not None and not (isinstance(tile, tuple | list) and len(tile) == 2):
        raise UnsupportedError(f"tile is a pair such as {plain} or (16, 16), not {tile!r}")
    if tile is not None and not all(hasattr(side, "__index__") for side in tile):
        raise UnsupportedError(f"tile is a pair of whole numbers such as {plain} or (16, 16), not {tile!r}")
    if tile is None or tuple(tile) == plain:
        return plain
    tiles = tuple(known for known in rule.tiles if known[1] == format.block) if isinstance(rule, NVFP4Rule) else ()
    if tuple(tile) not in tiles:
        listed = ", ".join(map(str, dict.fromkeys((plain, *tiles))))
        raise UnsupportedError(
            f"tile {tuple(tile)} does not fit: contract {contract.name} has {listed} for {format.name} with blocks of "
            f"{format.block}"
        )
    if scaling == "row":
        raise UnsupportedError(
            f"tile {tuple(tile)} spans rows, so it cannot have one global scale per row; use tile=None"
        )
    return (int(tile[0]), int(tile[1]))
