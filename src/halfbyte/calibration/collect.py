"""`calibrate`: statistics of every linear layer, layer after layer."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from halfbyte.calibration.layered import Layer, LayeredModel
from halfbyte.calibration.moments import Moments, Products, products_of
from halfbyte.calibration.parallel import Workers, workers_for
from halfbyte.calibration.states import MEMORY, States, batches_of
from halfbyte.calibration.tokens import Windows, check_vocabulary
from halfbyte.calibration.watch import Watch
from halfbyte.calibration.weights import open_weights
from halfbyte.errors import InputError, unknown_name
from halfbyte.statistics import (
    HEADER,
    MOMENTS,
    LinearStatistics,
    Statistics,
    open_statistics,
    write_header,
    write_statistics,
)
from halfbyte.statistics.linear import BLOCK
from halfbyte.subnormals import subnormals_kept

FILE = "layer-{:05d}.safetensors"
FEW = 2
"""An expert with fewer tokens than this many per input has full moments that say too little: it gets a diagonal."""

Progress = Callable[[int, int], None]
"""(layers done, layers)"""


@dataclass(frozen=True)
class Options:
    """What decides the statistics."""

    moments: str = "full"
    device: str = "cpu"
    memory: int = MEMORY
    is_part: bool = False
    """Whether the windows are a part of all: then experts that saw few tokens keep all moments, to be added up."""

    def __post_init__(self) -> None:
        if self.moments not in MOMENTS:
            raise unknown_name("kind of moments", self.moments, MOMENTS)


@subnormals_kept()
def calibrate(
    model: Path, windows: Windows, target: Path, options: Options | None = None, progress: Progress | None = None
) -> Statistics:
    """Write the statistics of a model on some windows. Layers that the folder has already are not computed again.

    Refused: a folder with statistics of another model, other text or other options.
    """
    options = options or Options()
    weights = open_weights(model)
    layered = LayeredModel(weights, options.device)
    check_vocabulary(windows, layered.vocabulary)
    header = {
        "model": {"name": weights.model.name, "fingerprint": weights.fingerprint},
        "text": windows.as_json(),
        "options": {"moments": options.moments, **({"is_part": True} if options.is_part else {})},
        "device": device_name(options.device),
        "versions": versions(),
    }
    old = _check_earlier(target, header)
    files = [target / FILE.format(number) for number in range(len(layered.layers))]
    if old.get("complete") and all(file.exists() for file in files):
        if progress is not None:
            progress(len(files), len(files))
        return open_statistics(target)
    few = dict(old["few_tokens"]) if isinstance(old.get("few_tokens"), dict) else {}
    write_header(target, {**header, "complete": False, "few_tokens": few})
    batches = batches_of(torch.from_numpy(windows.tokens), layered.device)
    with workers_for(layered.device) as workers:
        states = States(layered.embed, batches, options.memory)
        for number, file in enumerate(files):
            with layered.layer(number) as layer:
                if file.exists():
                    states.replace(layer, workers)
                else:
                    found, shared = _layer(layer, states, options, workers)
                    kept = found if options.is_part else {name: enough(one, few, name) for name, one in found.items()}
                    for name in layered.linears(number):
                        if name not in kept and ".experts." in name:
                            few[name] = 0
                    write_header(target, {**header, "complete": False, "few_tokens": few})
                    write_statistics(file, kept, shared)
            if progress is not None:
                progress(number + 1, len(files))
    write_header(target, {**header, "complete": True, "few_tokens": few})
    return open_statistics(target)


Seen = list[tuple[str, torch.Tensor, Products]]
"""Linear layers in the order of their use, with their inputs and the sums over them."""


def _layer(
    layer: Layer, states: States, options: Options, workers: Workers
) -> tuple[dict[str, LinearStatistics], dict[str, str]]:
    """Statistics of one layer's linear layers, and whose arrays each has. The states move on behind the layer."""
    moments: dict[str, Moments] = {}
    shared: dict[str, str] = {}

    def kind(x: torch.Tensor) -> str:
        return "diagonal" if options.moments == "blocks" and x.shape[1] % BLOCK else options.moments

    def run(number: int) -> tuple[torch.Tensor, Seen, dict[str, str]]:
        seen: Seen = []
        same: dict[str, str] = {}

        def visit(module: str, x: torch.Tensor, again: bool) -> None:
            if again:
                same[module] = seen[-1][0]
            else:
                seen.append((module, x, products_of(x, kind(x))))

        with Watch(layer.places, visit):
            out = layer(states[number])
        return out, seen, same

    def add(number: int, result: tuple[torch.Tensor, Seen, dict[str, str]]) -> None:
        states[number], seen, same = result
        for module, x, products in seen:
            shared.setdefault(module, module)
            if module not in moments:
                moments[module] = Moments(x.shape[1], kind(x), x.device)
            moments[module].add(x, products=products)
        for module, first in same.items():
            shared.setdefault(module, first)

    workers.each(len(states), run, add)
    done = {name: one.finish() for name, one in moments.items()}
    return {module: done[place] for module, place in shared.items()}, shared


def enough(found: LinearStatistics, few: dict[str, int], name: str) -> LinearStatistics:
    """The statistics, or only their diagonal if they are of too few tokens of an expert."""
    if ".experts." not in name or found.tokens >= FEW * found.width or found.second_moment is None:
        return found
    few[name] = found.tokens
    return replace(found, second_moment=None, diagonal=found.mean_squares())


def _check_earlier(target: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The header of an earlier run for the same statistics, or nothing; any other run is refused."""
    if not target.exists() or all(file.name == f"{HEADER}.part" for file in target.iterdir()):
        return {}
    if not (target / HEADER).exists():
        raise InputError(f"{target} is not empty and holds no {HEADER}; give a new folder")
    old = open_statistics_header(target)
    for part in ("model", "text", "options", "device"):
        if old.get(part) != header[part]:
            raise InputError(f"{target} has statistics of another run ({part} differs); give a new folder")
    return old


def open_statistics_header(target: Path) -> dict[str, Any]:
    import json

    try:
        found = json.loads((target / HEADER).read_text())
    except ValueError as error:
        raise InputError(f"{target / HEADER}: cannot be read as JSON: {error}") from error
    return found if isinstance(found, dict) else {}


def device_name(device: str) -> str:
    """What computes: statistics differ in their last bits between devices."""
    if torch.device(device).type == "cuda":
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"cpu {platform.machine()}"


def versions() -> dict[str, str]:
    found = {}
    for name in ("halfbyte", "torch", "transformers", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
