"""GPTQ behind quantized layers: module group after module group, the unquantized model's inputs beside them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from halfbyte.calibration.collect import FEW, Progress
from halfbyte.calibration.layered import Layer, LayeredModel
from halfbyte.calibration.moments import Moments
from halfbyte.calibration.states import MEMORY, States
from halfbyte.calibration.tokens import Windows, check_vocabulary
from halfbyte.calibration.watch import StopForwardError, Watch
from halfbyte.calibration.weights import open_weights
from halfbyte.checkpoint import Plan
from halfbyte.checkpoint.io.solved import SolvedFolder, SolvedWeight, write_solved
from halfbyte.contracts import Contract, get_contract
from halfbyte.errors import CheckpointError, InputError
from halfbyte.feedback import gptq, prepare
from halfbyte.formats import BlockFormat
from halfbyte.methods import Gptq
from halfbyte.quantize import dequantize, quantize
from halfbyte.types import QuantizedTensor

FILE = "layer-{:05d}.safetensors"
HEADER = "solved.json"


@dataclass(frozen=True)
class Options:
    """How layers are solved, and where."""

    method: Gptq = Gptq()
    device: str = "cpu"
    memory: int = MEMORY


@dataclass(frozen=True)
class Target:
    """What every weight becomes."""

    format: BlockFormat
    contract: Contract
    groups: Mapping[str, tuple[str, ...]]
    """Module → those that share its tensor scale, itself included."""


def solve_sequentially(
    plan: Plan, windows: Windows, target: Path, options: Options | None = None, progress: Progress | None = None
) -> None:
    """Solve every weight that a plan quantizes, and write codes and scales to a folder; finished layers are kept.

    A file per layer holds, for each weight, `<module>.weight.codes` and `.scales` (uint8) and, in NVFP4,
    `.global_amax` (float32, one number). Experts without tokens are rounded with optimal scales, those with too few
    tokens with optimal scales weighted by the mean squares of their inputs.
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
    tokens = torch.from_numpy(windows.tokens)
    real = States((model.embed(row) for row in tokens), len(tokens), options.memory)
    rounded = States((model.embed(row) for row in tokens), len(tokens), options.memory)
    for number in range(len(model.layers)):
        file = target / FILE.format(number)
        if file.exists():
            with model.layer(number) as layer:
                values = _decoded(layer, target, aim)
        else:
            with model.layer(number) as layer, model.layer(number) as copy:
                amaxes = _shared_amaxes(layer, aim)
                solved, values = _solve_layer(layer, copy, (real, rounded), aim, options.method, amaxes)
            write_solved(file, _written(solved, amaxes, aim), aim.format, aim.contract, options.method)
        with model.layer(number) as layer:
            real.replace(layer)
        with model.layer(number, values) as layer:
            rounded.replace(layer)
        if progress is not None:
            progress(number + 1, len(model.layers))


def _check_reached(model: LayeredModel, modules: Iterable[str]) -> None:
    """Every weight that is to be solved must be in a layer."""
    inside = {name for number in range(len(model.layers)) for name in model.linears(number)}
    outside = [name for name in modules if name not in inside]
    if outside:
        raise InputError(
            f"{outside[0]} and {len(outside) - 1} more are quantized by the plan but are no single weights of a layer; "
            "--keep them, choose a layout that splits experts, or calibrate with --stats"
        )


def _shared_amaxes(layer: Layer, aim: Target) -> dict[str, float]:
    """Module → the amax that its tensor scale comes from."""
    own = {name: float(layer.weight(name).abs().max()) for name in layer.parts if name in aim.groups}
    return {name: max(own.get(other, 0.0) for other in aim.groups[name]) for name in own}


def _solve_layer(
    layer: Layer,
    copy: Layer,
    streams: tuple[States, States],
    aim: Target,
    method: Gptq,
    amaxes: Mapping[str, float],
) -> tuple[dict[str, QuantizedTensor], dict[str, torch.Tensor]]:
    """Every weight of a layer, in the order in which the layer uses them; `copy` becomes the quantized layer."""
    solved: dict[str, QuantizedTensor] = {}
    values: dict[str, torch.Tensor] = {}
    for group in _groups(layer, streams[0]):
        wanted = [name for name in group if name in aim.groups]
        moments = _inputs(layer, copy, group[0], *streams) if wanted else None
        if moments is None:
            continue
        stats = moments.finish()
        factor = prepare(stats.second_moment, aim.format.block, method, cross_moment=stats.cross_moment, name=group[0])
        for name in wanted:
            solved[name] = _solve(layer.weight(name), factor, stats, amaxes[name], aim, name)
            values[name] = torch.from_numpy(np.array(dequantize(solved[name]), np.float32))
            copy.weight(name).copy_(values[name])
    for name, amax in amaxes.items():
        if name not in solved:  # an expert without tokens
            solved[name] = _nearest(layer.weight(name), amax, aim, None)
            values[name] = torch.from_numpy(np.array(dequantize(solved[name]), np.float32))
    return solved, values


def _solve(weight: torch.Tensor, factor: Any, stats: Any, amax: float, aim: Target, name: str) -> QuantizedTensor:
    array = weight.cpu().contiguous().numpy()
    if ".experts." in name and stats.tokens < FEW * stats.width:
        return _nearest(weight, amax, aim, stats.mean_squares())
    return gptq(array, factor, aim.format, aim.contract, global_amax=_amax(amax, aim), name=name)


def _nearest(weight: torch.Tensor, amax: float, aim: Target, squares: Any) -> QuantizedTensor:
    from halfbyte.methods import Optimal

    method = Optimal() if squares is None else Optimal(weights=squares)
    array = weight.cpu().contiguous().numpy()
    return quantize(array, aim.format, aim.contract, method=method, global_amax=_amax(amax, aim))


def _amax(amax: float, aim: Target) -> np.float32 | None:
    return np.float32(amax) if aim.format.has_global else None


def _groups(layer: Layer, states: States) -> list[list[str]]:
    """Linear layers with the same input, in the order of their use; experts that no window reaches are left out."""
    groups: list[list[str]] = []
    seen: set[str] = set()

    def visit(module: str, x: torch.Tensor, again: bool) -> None:
        if module in seen:
            return
        seen.add(module)
        if again and groups:
            groups[-1].append(module)
        else:
            groups.append([module])

    for number in range(len(states)):
        with Watch(layer.places, visit):
            layer(states[number])
        if len(seen) == len(layer.parts):
            break
    return groups


def _inputs(layer: Layer, copy: Layer, module: str, real: States, rounded: States) -> Moments | None:
    """Moments of the inputs of one linear layer behind quantized layers, and their cross moments."""
    moments: Moments | None = None
    for number in range(len(real)):
        before, after = _capture(layer, module, real[number]), _capture(copy, module, rounded[number])
        if after is None:
            continue
        if moments is None:
            moments = Moments(after.shape[1], "full", after.device, cross=True)
        same = before is not None and before.shape == after.shape and ".experts." not in module
        moments.add(after, before if same else None)
    return moments


def _capture(layer: Layer, module: str, states: torch.Tensor) -> torch.Tensor | None:
    found: list[torch.Tensor] = []

    def visit(name: str, x: torch.Tensor, again: bool) -> None:
        if name == module:
            found.append(x)
            if ".experts." not in name:
                raise StopForwardError

    try:
        with Watch(layer.places, visit):
            layer(states)
    except StopForwardError:
        pass
    return found[0] if found else None


def _written(
    solved: Mapping[str, QuantizedTensor], amaxes: Mapping[str, float], aim: Target
) -> dict[str, SolvedWeight]:
    return {
        f"{name}.weight": SolvedWeight(np.asarray(found.codes), np.asarray(found.scales), _amax(amaxes[name], aim))
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
                "method": str(options.method),
                "text": windows.as_json(),
                **({} if plan.smoothing is None else {"smoothing": plan.smoothing.digest}),
            }
        )
    )


def _check_header(target: Path, header: dict[str, Any]) -> None:
    """Continue a folder of the same run; refuse any other."""
    path = target / HEADER
    if path.exists():
        if json.loads(path.read_text()) != header:
            raise CheckpointError(f"{target} was solved from another source, text or method; give a new folder")
        return
    if target.exists() and any(target.iterdir()):
        raise CheckpointError(f"{target} is not empty and holds no {HEADER}; give a new folder")
    target.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header, indent=1) + "\n")
