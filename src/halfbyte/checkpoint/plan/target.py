"""The target of a conversion: format, layout, contract and method that fit together; scales of activations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from halfbyte.checkpoint.io.index import read_json
from halfbyte.checkpoint.plan.types import Options
from halfbyte.contracts import Contract, NVFP4Rule, get_contract
from halfbyte.contracts.spec import Rule, defined_methods
from halfbyte.errors import CheckpointError, InputError, UnsupportedError, unknown_name
from halfbyte.feedback import request_for
from halfbyte.formats import BlockFormat, get_format
from halfbyte.layouts import get_layout, writable_layouts
from halfbyte.layouts.description import Activations, Layout
from halfbyte.methods import METHODS, Method, Optimal
from halfbyte.models.families import Family
from halfbyte.models.names import same_projection
from halfbyte.request import resolve

TARGETS = ("nvfp4", "mxfp4", "bf16")
STATS = "stats"
BY_STATISTICS = ("gptq", "hessian")
"""Methods that convert has where there are statistics."""
"""--activations by statistics."""
DEFAULT_CONTRACT = {"nvfp4": "modelopt", "mxfp4": "ocp"}

MEANING = {
    "none": "W4A16: weights are FP4, a server computes with unquantized activations",
    "unit": "W4A4 with input_scale 1.0: activations become FP4 too; block amaxes between about 0.01 and 2688 fit",
    "stats": "W4A4 with input scales from statistics: activations become FP4 too",
    "file": "W4A4 with calibrated input scales: activations become FP4 too",
    "source": "W4A4 with the source's own input scales",
    "dynamic": "W4A4: activations become FP4 too, their scales are computed while serving",
}
"""What each kind of activations means for a server."""


@dataclass(frozen=True)
class Target:
    """Format, layout, contract and method, checked against each other."""

    format: BlockFormat | None
    layout: Layout
    contract: Contract | None
    method: str | Method | None
    repairs: bool
    """Whether tensors without a usable scale (all zero, or tiny) get one that every reader can use."""


def resolve_target(options: Options, family: Family) -> Target:
    """The target that the options name. Raises for a combination that has no definition."""
    if options.to not in TARGETS:
        raise unknown_name("target format", options.to, TARGETS)
    layout = get_layout(options.layout)
    given = (options.statistics, options.solved, options.smoothing)
    if options.to == "bf16" and any(one is not None for one in given):
        raise InputError("statistics, solved weights and smoothing belong to conversions to FP4, not to bf16")
    if options.to == "bf16":
        return Target(None, layout, None, None, repairs=False)
    if options.to not in layout.formats:
        named = [other for other in writable_layouts().values() if not other.replaces]
        known = ", ".join(f"{other.name} ({', '.join(other.formats)})" for other in named)
        raise UnsupportedError(
            f"layout {layout.name} holds {', '.join(layout.formats)}, not {options.to}; layouts: {known}"
        )
    if family.native_fp8:
        layout = _beside_fp8(layout, family)
    if layout.stacking is not None and family.stacking not in (None, layout.stacking):
        raise UnsupportedError(
            f"layout {layout.name} is read for {layout.name} models only, not for {family.name}; use --layout "
            "compressed-tensors"
        )
    format = get_format(options.to)
    contract = get_contract(options.contract or DEFAULT_CONTRACT[options.to], format)
    repairs = options.contract is None or contract.name in DEFAULT_CONTRACT.values()
    if contract.name == "transformer_engine":
        if contract.options:
            raise UnsupportedError(
                f"contract {contract!r}: a checkpoint holds TransformerEngine's blocks as miles stores them, which has "
                "none of these options; leave them out (4over6 is a method: four_six)"
            )
        # TransformerEngine hands out amaxes; miles is its checkpoint form: same blocks, a multiplier beside them
        contract = get_contract("miles", format)
    rule = contract.rule(format)
    if isinstance(rule, NVFP4Rule) and (rule.stored is None or contract.scaling == "row"):
        raise UnsupportedError(f"contract {contract!r} has no scale of the whole tensor to store beside the blocks")
    method = options.method
    if method is None and options.contract is None and options.to == "nvfp4":
        method = "optimal"
    if by_statistics(options):
        request_for(format, contract)
        method = _without_statistics(options)
    _check_method(method, rule)
    resolve(format, contract, method)
    return Target(format, layout, contract, method, repairs)


def by_statistics(options: Options) -> bool:
    """Whether codes come from statistics or from solved weights. Raises if the options do not fit together."""
    method, named = options.method, options.served
    for_inputs = options.activations == STATS or options.smoothing is not None
    if options.solved is not None:
        if (options.statistics is not None and not for_inputs) or method is not None:
            raise InputError("solved weights have their codes already: leave out the method and the statistics")
        return True
    if options.statistics is None:
        if options.strict_statistics:
            raise InputError("--strict-stats belongs to --stats")
        if options.activations == STATS and get_format(options.to).has_global:
            raise InputError("--activations stats needs statistics: --stats DIR (`halfbyte calibrate` makes them)")
        if named is not None:
            raise UnsupportedError(
                f"method {named!r} needs statistics of the inputs of every layer: --stats DIR (`halfbyte calibrate` "
                "makes them)"
            )
        return False
    if named is None and not for_inputs:
        raise InputError(
            f"statistics serve --method gptq and --method hessian, not {method or 'the default method'}; and "
            "--activations stats, and --smooth"
        )
    return named is not None


def _without_statistics(options: Options) -> str | Method:
    """The method of what has no statistics. It chooses the headroom of all weights, those with statistics included."""
    headroom = options.headroom
    return Optimal.name if headroom is None else Optimal(headroom=headroom)


def _check_method(method: str | Method | None, rule: Rule) -> None:
    """Raise for an unknown name, with those that a conversion under this rule has."""
    if not isinstance(method, str) or method.split(":")[0] in METHODS:
        return
    defined = defined_methods(rule)
    names = [
        name
        for name, kind in METHODS.items()
        if kind.needs or kind.everywhere or any(isinstance(candidate, kind) for candidate in defined)
    ]
    raise unknown_name("method", method, names)


def _beside_fp8(layout: Layout, family: Family) -> Layout:
    """The layout in place of the one that was named, for a family that stays FP8 where it is not converted."""
    for other in writable_layouts().values():
        if other.replaces == layout.name:
            return other
    raise UnsupportedError(
        f"{family.name} stays FP8 outside its experts, which no reader of layout {layout.name} expects; "
        "use --to nvfp4 --layout modelopt"
    )


def activations_of(options: Options, target: Target, sources_have: bool) -> tuple[str, Activations]:
    """Which kind of activations to write: (key of MEANING, what the layout is told)."""
    wanted = options.activations
    if wanted is None:
        if sources_have:
            return "source", "static"
        is_miles = target.contract is not None and target.contract.name == "miles"
        wanted = "unit" if is_miles or target.layout.needs_input_scales else "none"
    if wanted == "none":
        return "none", "none"
    if target.format is not None and not target.format.has_global:
        return "dynamic", "static"
    return (wanted if wanted in ("unit", STATS) else "file"), "static"


def input_scales(
    kind: str,
    options: Options,
    groups: Sequence[Sequence[str]],
    names: Callable[[], Mapping[str, Collection[str]]],
    amaxes: Callable[[], Mapping[str, float]],
) -> dict[str, float]:
    """Multiplier of the activations of every module; members of a group share the largest.

    A calibration file is a JSON object: module → largest magnitude of its input. An expert that saw no token takes the
    largest of the other experts' same projection. names: what the file may name, and which modules are meant by it.
    amaxes: module → largest magnitude, by statistics.
    """
    modules = [module for group in groups for module in group]
    if kind == "unit":
        return dict.fromkeys(modules, 1.0)
    if kind == STATS:
        given, origin = dict(amaxes()), f"--activations stats: {options.statistics}"
    elif kind == "file":
        origin = str(options.activations)
        given = _by_module(origin, _read_amaxes(Path(origin)), names())
    else:
        return {}
    siblings: dict[str, float] = {}
    for module, value in given.items():
        key = same_projection(module)
        siblings[key] = max(siblings.get(key, 0.0), value)
    scales: dict[str, float] = {}
    for group in groups:
        found = []
        for module in group:
            amax = given[module] if module in given else siblings.get(same_projection(module))
            if amax is None:
                raise CheckpointError(f"{origin}: no amax for {module}, which is quantized; --keep it, or calibrate it")
            found.append(amax)
        limits = np.finfo(np.float32)
        if not float(limits.tiny) * 2688 <= max(found) <= float(limits.max):
            raise CheckpointError(f"{origin}: {group[0]} has the amax {max(found):g}, whose scale is no normal float32")
        scales |= dict.fromkeys(group, float(np.float32(max(found)) / np.float32(2688)))
    return scales


def _by_module(file: str, given: Mapping[str, float], names: Mapping[str, Collection[str]]) -> dict[str, float]:
    """The amaxes under the names of modules on disk. A name that is no module is misspelt, or of another model."""
    unknown = [name for name in given if name not in names]
    if unknown:
        others = f" ({len(unknown) - 1} more names in it are unknown)" if len(unknown) > 1 else ""
        raise CheckpointError(f"--activations {file}: {unknown_name('module', unknown[0], names, listed=0)}{others}")
    amaxes: dict[str, float] = {}
    for name, value in given.items():
        for module in names[name]:
            amaxes[module] = max(amaxes.get(module, 0.0), value)
    return amaxes


def _read_amaxes(path: Path) -> Mapping[str, float]:
    if not path.is_file():
        raise CheckpointError(f"--activations {path}: neither none, unit nor stats, nor a file that is there")
    given = read_json(path)
    amaxes: dict[str, float] = {}
    for module, value in given.items():
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value <= 0:
            raise CheckpointError(f"{path}: {module} has {value!r}; expected the largest magnitude, a positive number")
        amaxes[module] = float(value)
    return amaxes
