"""GPTQ behind quantized layers: module group after module group, the unquantized model's inputs beside them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfbyte.arrays import to_numpy
from halfbyte.calibration.collect import Progress, device_name
from halfbyte.calibration.layer_work import LayerWork, Options, Target
from halfbyte.calibration.layered import Layer, LayeredModel
from halfbyte.calibration.parallel import workers_for
from halfbyte.calibration.states import States, batches_of
from halfbyte.calibration.tokens import Windows, check_vocabulary
from halfbyte.calibration.weights import open_weights
from halfbyte.checkpoint import Plan
from halfbyte.checkpoint.io.solved import HEADER, SolvedFolder, SolvedWeight, write_solved
from halfbyte.contracts import get_contract
from halfbyte.errors import CheckpointError, InputError
from halfbyte.methods.optimal import checked_headroom
from halfbyte.quantize import dequantize, quantize
from halfbyte.subnormals import subnormals_kept
from halfbyte.types import QuantizedTensor

__all__ = ["Options", "solve_sequentially"]

FILE = "layer-{:05d}.safetensors"
FEW_FILE = "few_tokens.json"
"""Experts that were solved without second moments → how many tokens they saw."""


@subnormals_kept()
def solve_sequentially(
    plan: Plan,
    windows: Windows,
    target: Path,
    options: Options | None = None,
    progress: Progress | None = None,
    visit: Callable[[str, torch.Tensor], None] | None = None,
) -> dict[str, int]:
    """Solve every weight that a plan quantizes, and write codes and scales to a folder; finished layers are kept.

    A file per layer holds, for each weight, `<module>.weight.codes` and `.scales` (uint8) and, in NVFP4,
    `.global_amax` (float32, one number). Experts without tokens are rounded with optimal scales, those with too few
    tokens with optimal scales weighted by the mean squares of their inputs: these are returned, with their tokens.
    visit: gets every weight that is solved, decoded.
    """
    options = options or Options()
    if plan.format is None:
        raise InputError("sequential GPTQ quantizes; the plan decodes to bf16")
    contract = plan.contract or get_contract(None, plan.format)
    modules = {unit.module: unit for unit in plan.units if unit.action == "quantize"}
    groups = {name: group for group in plan.groups for name in group if name in modules}
    aim = Target(plan.format, contract, {name: groups.get(name, (name,)) for name in modules})
    model = LayeredModel(open_weights(plan.source, plan.smoothing), options.device)
    check_vocabulary(windows, model.vocabulary)
    _check_reached(model, modules)
    _check_header(target, _describe(plan, windows, options))
    few = _read_few(target)
    files = [target / FILE.format(number) for number in range(len(model.layers))]
    if all(file.exists() for file in files):
        if progress is not None:
            progress(len(files), len(files))
        return few
    batches = batches_of(torch.from_numpy(windows.tokens), model.device)
    with workers_for(model.device) as workers:
        limit = options.memory // (2 if options.method.asymmetry else 1)
        rounded = States(model.embed, batches, limit)
        real = States(model.embed, batches, limit) if options.method.asymmetry else None
        for number, file in enumerate(files):
            with model.layer(number) as layer:
                if file.exists():
                    if real is not None:
                        real.replace(layer, workers)
                    for module, values in _decoded(layer, target, aim).items():
                        layer.weight(module).copy_(values)
                    rounded.replace(layer, workers)
                else:
                    work = LayerWork(layer, real, rounded, aim, options, workers)
                    solved = work.solve()
                    few |= work.few
                    if visit is not None:
                        for module in solved:
                            visit(module, work.copy.weight(module))
                    _write_json(target / FEW_FILE, few)
                    weights, headroom = _written(solved, work.amaxes, aim), checked_headroom(options.method.headroom)
                    write_solved(file, weights, aim.format, aim.contract, options.method, headroom)
            if progress is not None:
                progress(number + 1, len(files))
    return few


def _check_reached(model: LayeredModel, modules: Iterable[str]) -> None:
    """Every weight that is to be solved must be in a layer."""
    inside = {name for number in range(len(model.layers)) for name in model.linears(number)}
    outside = [name for name in modules if name not in inside]
    if outside:
        raise InputError(
            f"{outside[0]} and {len(outside) - 1} more are quantized by the plan but are no single weights of a layer; "
            "--keep them, choose a layout that splits experts, or calibrate with --stats"
        )


def _written(
    solved: Mapping[str, QuantizedTensor], amaxes: Mapping[str, np.float32], aim: Target
) -> dict[str, SolvedWeight]:
    return {
        f"{name}.weight": SolvedWeight(
            to_numpy(found.codes), to_numpy(found.scales), amaxes[name] if aim.format.has_global else None
        )
        for name, found in solved.items()
    }


def _decoded(layer: Layer, folder: Path, aim: Target) -> dict[str, torch.Tensor]:
    """The values of a layer's weights that were solved before."""
    solved = SolvedFolder(folder)
    solved.check(aim.format, aim.contract)
    found = {}
    for module in layer.parts:
        name = f"{module}.weight"
        if module not in aim.groups or name not in solved:
            continue
        shape = tuple(layer.weight(module).shape)
        codes, scales = solved.rows(name, (shape[0], shape[1]), 0, shape[0], aim.format)
        word, stored = _tensor_scales(solved.amax(name), aim) if aim.format.has_global else (None, None)
        one = QuantizedTensor(aim.format, shape, codes, scales, word, stored, aim.contract)
        found[module] = torch.from_numpy(np.array(dequantize(one), np.float32))
    return found


def _read_few(target: Path) -> dict[str, int]:
    path = target / FEW_FILE
    return _read_json(path) if path.exists() else {}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}; delete the folder {path.parent} and start again") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    """To a temporary name, then renamed: a run that is killed leaves no half of it."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(part, path)


def _tensor_scales(amax: np.float32, aim: Target) -> tuple[Any, Any]:
    """The tensor scale that an amax has under the contract, as it multiplies and as it is stored."""
    made = quantize(np.zeros((1, aim.format.block), np.float32), aim.format, aim.contract, global_amax=amax)
    return made.global_scale, made.stored_scale


def _describe(plan: Plan, windows: Windows, options: Options) -> dict[str, Any]:
    choices = plan.choices
    files = [(file.name, file.size, file.header) for file in plan.files]
    return json.loads(  # type: ignore[no-any-return]
        json.dumps(
            {
                "files": files,
                "to": choices["to"],
                "contract": choices["contract"],
                "method": repr(options.method),
                "device": device_name(options.device),
                "text": windows.as_json(),
                **({} if plan.smoothing is None else {"smoothing": plan.smoothing.digest}),
            }
        )
    )


def _check_header(target: Path, header: dict[str, Any]) -> None:
    """Continue a folder of the same run; refuse any other."""
    path = target / HEADER
    if path.exists():
        if _read_json(path) != header:
            raise CheckpointError(f"{target} was solved from another source, text or method; give a new folder")
        return
    if target.exists() and any(file.name != f"{HEADER}.part" for file in target.iterdir()):
        raise CheckpointError(f"{target} is not empty and holds no {HEADER}; give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    _write_json(path, header)
