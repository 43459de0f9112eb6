"""The largest magnitude of each module's input, from a folder of statistics: what input scales are made of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from halfbyte.checkpoint.plan.calibrated import open_named, statistics_name
from halfbyte.checkpoint.plan.draft import Draft
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.models.names import ROUTED, same_projection
from halfbyte.smoothing import Smoothing
from halfbyte.statistics import LinearStatistics


def input_amaxes(
    draft: Draft, path: Path, names: Mapping[str, Iterable[str]], smoothing: Smoothing | None
) -> dict[str, float]:
    """Module → the largest magnitude of its input, behind the factors of smoothing.

    All routed experts of a layer have one per projection: servers run them as one, with one scale. Modules that no
    token reached, or whose statistics do not know the magnitude (imatrix files), are left out.
    """
    statistics, called = open_named(path, names)
    columns = {} if smoothing is None else smoothing.columns
    found: dict[str, float] = {}
    for weight in draft.converted:
        for number, source in enumerate(weight.sources):
            name = statistics_name(draft, weight, number, called)
            if name is None:
                continue
            try:
                known = statistics.get(name, source.columns, ("channel_amax",))
            except HalfbyteError as error:
                raise CheckpointError(f"--activations stats: {error}") from error
            if known is None:
                continue
            if weight.module in columns:
                known = _divided(known, columns[weight.module], path, name)
            if known.tokens and known.input_amax > 0:
                found[weight.module] = max(found.get(weight.module, 0.0), known.input_amax)
    together: dict[str, float] = {}
    for module, amax in found.items():
        key = same_projection(module)
        together[key] = max(together.get(key, 0.0), amax)
    return {module: together[same_projection(module)] if ROUTED in module else amax for module, amax in found.items()}


def _divided(known: LinearStatistics, exponents: object, path: Path, name: str) -> LinearStatistics:
    import numpy as np

    if known.channel_amax is None:
        raise CheckpointError(
            f"--activations stats: {path} lacks the largest magnitude of each input of {name} (channel_amax), which "
            "smoothing needs; calibrate again with this halfbyte"
        )
    return known.divided(np.asarray(exponents, np.int8))
