"""The factors of smoothing in a plan: checked against the weights that are quantized, and given to units."""

from __future__ import annotations

from pathlib import Path

from halfbyte.checkpoint.plan.draft import Draft, action_of
from halfbyte.checkpoint.plan.types import Factors, Options
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.layouts.description import FLOATS
from halfbyte.smoothing import Link, Smoothing, read_smoothing


def plan_smoothing(draft: Draft, options: Options) -> Smoothing | None:
    """The factors that the options name. Raises if they do not fit what is quantized."""
    if options.smoothing is None:
        return None
    try:
        given = options.smoothing
        smoothing = given if isinstance(given, Smoothing) else read_smoothing(Path(given))
    except HalfbyteError as error:
        raise CheckpointError(f"--smooth: {error}") from error
    quantized = {
        weight.module: (weight.sources[0].rows, weight.sources[0].columns)
        for weight in draft.converted
        if not weight.stacked and action_of(weight, draft.target) == "quantize"
    }
    for link in smoothing.links:
        _check(draft, link, quantized)
    return smoothing


def _check(draft: Draft, link: Link, quantized: dict[str, tuple[int, int]]) -> None:
    """Raise unless everything that a link scales is computed anew, and has as many channels."""
    for module in (*link.into, *(() if link.norm else (link.origin,))):
        if module not in quantized:
            raise CheckpointError(f"--smooth: factors for {module}, which is not quantized from values; fit them anew")
    count = len(link.exponents) if link.norm else quantized[link.origin][0]
    if count != len(link.exponents):
        raise CheckpointError(f"--smooth: {link.origin} has {count} rows, but {len(link.exponents)} factors")
    if link.norm:
        tensor = draft.checkpoint.tensors.get(f"{link.origin}.weight")
        if tensor is None or tensor.shape != link.exponents.shape or tensor.dtype not in FLOATS:
            raise CheckpointError(f"--smooth: {link.origin} is no norm of {len(link.exponents)} channels")
    for module in link.into:
        if quantized[module][1] != len(link.columns):
            raise CheckpointError(
                f"--smooth: {module} has {quantized[module][1]} columns, but {len(link.columns)} factors"
            )


def factors_of(smoothing: Smoothing | None, module: str) -> Factors | None:
    """What is folded into the weight of a module, or into a vector of that name."""
    if smoothing is None:
        return None
    if module in smoothing.vectors:
        return Factors(rows=smoothing.vectors[module].tobytes())
    columns, rows = smoothing.columns.get(module), smoothing.rows.get(module)
    if columns is None and rows is None:
        return None
    return Factors(b"" if columns is None else columns.tobytes(), b"" if rows is None else rows.tobytes())
