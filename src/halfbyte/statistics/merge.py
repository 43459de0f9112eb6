"""Statistics of several runs as one: means weighted by tokens, in float64, in the order of the runs.

Largest magnitudes are the largest of all. The sample has tokens of every run, by its share of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from halfbyte.errors import InputError
from halfbyte.statistics.folder import Statistics, open_statistics, write_header, write_statistics
from halfbyte.statistics.linear import ARRAYS, F32, SAMPLED, LinearStatistics

FILE = "merged-{:05d}.safetensors"
MODULES_PER_FILE = 16
MEANS = [part for part in ARRAYS if part not in ("channel_amax", "sample")]
"""Arrays that are means over tokens."""


def merge_statistics(
    parts: Sequence[Path | str],
    target: Path,
    keep: Callable[[str, LinearStatistics], LinearStatistics] = lambda name, merged: merged,
    about: Callable[[], dict[str, Any]] = dict,
) -> Statistics:
    """Write the merged statistics of several folders and open them.

    A module that some folders lack comes from the others. An array that one of a module's folders lacks is left out,
    unless the module has no tokens there; of second moments, what all of them know is kept: the 16 × 16 blocks, or the
    diagonal. The same folders in the same order give the same bytes.

    keep: what to keep of a module's merged statistics. about: further entries of the header, asked for at the end.
    """
    if not parts:
        raise InputError("there is nothing to merge: give the folders of two or more runs")
    target = Path(target)
    if target.exists() and any(target.iterdir()):
        raise InputError(f"{target} is not empty; merged statistics need a new folder")
    runs = [open_statistics(part) for part in parts]
    models = {str(run.header.get("model", {}).get("fingerprint", "")) for run in runs} - {""}
    if len(models) > 1:
        raise InputError(f"the statistics are of {len(models)} different models; only those of one can be merged")
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    for number, start in enumerate(range(0, len(names), MODULES_PER_FILE)):
        chunk = names[start : start + MODULES_PER_FILE]
        merged = {name: keep(name, _merged(name, [one for run in runs if (one := run.get(name))])) for name in chunk}
        write_statistics(target / FILE.format(number), merged, _shared(chunk, runs))
    merged_from = [_origin(run) for run in runs]
    write_header(target, {"model": runs[0].header.get("model", {}), "merged": merged_from, **about()})
    return open_statistics(target)


def _origin(run: Statistics) -> dict[str, Any]:
    return {key: value for key, value in run.header.items() if key not in ("format", "version", "model")} or {
        "file": run.path.name
    }


def _shared(names: Sequence[str], runs: Sequence[Statistics]) -> dict[str, str]:
    """Modules that share their arrays in every run share them still, under the first of them in the file."""
    first: dict[tuple[str | None, ...], str] = {}
    return {name: first.setdefault(tuple(run.stored_as(name) for run in runs), name) for name in names}


def _merged(name: str, found: Sequence[LinearStatistics]) -> LinearStatistics:
    width = found[0].width
    for other in found:
        if other.width != width:
            raise InputError(f"{name}: one run has {width} inputs, another {other.width}; they are of different models")
    seen = [other for other in found if other.tokens] or list(found[:1])
    ranges = [other.input_range for other in seen]
    return LinearStatistics(
        tokens=sum(other.tokens for other in seen),
        width=width,
        input_amax=max(other.input_amax for other in seen),
        input_range=None if None in ranges else _mean_number(seen, ranges),
        channel_amax=_largest(seen),
        sample=_sample(seen),
        **_means(seen),
    )


def _means(seen: Sequence[LinearStatistics]) -> dict[str, F32 | None]:
    """Every array that is a mean; where no array of second moments is in all of them, the most that all know."""
    found = {part: _mean(seen, [getattr(other, part) for other in seen]) for part in MEANS}
    if all(found[part] is None for part in ("second_moment", "blocks", "diagonal")):
        found["blocks"] = _mean(seen, [other.block_moments() for other in seen])
        if found["blocks"] is None:
            found["diagonal"] = _mean(seen, [other.mean_squares() for other in seen])
    return found


def _largest(seen: Sequence[LinearStatistics]) -> F32 | None:
    found = [other.channel_amax for other in seen]
    return None if any(one is None for one in found) else np.maximum.reduce([one for one in found if one is not None])


def _sample(seen: Sequence[LinearStatistics]) -> F32 | None:
    """Tokens of every run, as many of each as its share of all tokens, evenly spaced."""
    if any(other.sample is None for other in seen):
        return None
    total = max(1, sum(other.tokens for other in seen))
    parts = []
    for other in seen:
        if other.sample is not None and len(other.sample):
            count = min(len(other.sample), max(1, SAMPLED * other.tokens // total))
            parts.append(other.sample[np.arange(count) * len(other.sample) // count])
    found = np.concatenate(parts) if parts else np.zeros((0, seen[0].width), np.float32)
    return np.ascontiguousarray(found[:SAMPLED], np.float32)


def _mean_number(seen: Sequence[LinearStatistics], values: Sequence[float | None]) -> float:
    tokens = max(1, sum(other.tokens for other in seen))
    return sum(other.tokens * (value or 0.0) for other, value in zip(seen, values, strict=True)) / tokens


def _mean(seen: Sequence[LinearStatistics], arrays: Sequence[F32 | None]) -> F32 | None:
    given = [array for array in arrays if array is not None]
    if len(given) < len(arrays):
        return None
    if len(given) == 1:
        return np.asarray(given[0], np.float32)
    total = np.zeros(given[0].shape, np.float64)
    for other, array in zip(seen, given, strict=True):
        total += float(other.tokens) * array.astype(np.float64)
    return (total / sum(other.tokens for other in seen)).astype(np.float32)
