"""One class: built, saved, converted in three layouts, verified, loaded by transformers, computed."""

from __future__ import annotations

import re
import shutil
import traceback
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.errors import HalfbyteError
from halfbyte.verify import verify
from tests.zoo.build import Unbuildable, tiny_model
from tests.zoo.inputs import Inputs, NoInputs, compute, find_inputs

LAYOUTS: Mapping[str, Options] = {
    "modelopt nvfp4": Options(to="nvfp4", layout="modelopt"),
    "compressed-tensors nvfp4": Options(to="nvfp4", layout="compressed-tensors"),
    "compressed-tensors mxfp4": Options(to="mxfp4", layout="compressed-tensors"),
}
READER = "transformers"
"""A limit counts as said beforehand if a note of the plan or a warning of verify names the reader."""
CLOSE = 0.25
"""Relative error of a quantized weight, at most; 4-bit floats of random weights err by 0.08 to 0.13."""
EQUAL = 1e-5
"""Relative difference of outputs that are computed from the same weights, at most."""


@dataclass
class Result:
    """What came of one class. An outcome begins with `computes`, `said`, `silent` or `unbuildable`."""

    name: str
    model_type: str = ""
    parameters: int = 0
    inputs: tuple[str, ...] = ()
    quantized: int = 0
    """Modules that became NVFP4 in Model-Optimizer's layout."""
    outcomes: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def silent(self) -> bool:
        return any(outcome.startswith("silent") for outcome in self.outcomes.values())


class Wrong(Exception):
    """What transformers did with a checkpoint that it should have read."""


def examine(name: str, folder: Path) -> Result:
    """Everything about one class; `folder` is new and is removed."""
    result = Result(name)
    try:
        source, inputs = _source(result, folder / "source")
    except (Unbuildable, NoInputs) as error:
        result.outcomes = dict.fromkeys(LAYOUTS, f"unbuildable: {_line(error)}")
        return result
    for layout, options in LAYOUTS.items():
        result.outcomes[layout] = _outcome(result, layout, options, source, inputs, folder)
    shutil.rmtree(folder, ignore_errors=True)
    return result


def _source(result: Result, path: Path) -> tuple[Any, Inputs]:
    """The source checkpoint as transformers loads it back, and inputs for it."""
    model = tiny_model(result.name)
    result.model_type = str(model.config.model_type)
    result.parameters = sum(parameter.numel() for parameter in model.parameters())
    inputs = find_inputs(model)
    result.inputs = tuple(inputs)
    try:
        model.save_pretrained(path)
        loaded = load(type(model), path)
        _same(model, loaded)
        differs = relative(compute(loaded, inputs), compute(loaded, inputs))
    except Exception as error:
        raise Unbuildable(f"transformers does not read back what it saves: {_line(error)}") from error
    if differs:
        raise Unbuildable(f"the same model computes something else each time: {differs:.2g}")
    return loaded, inputs


def _same(saved: Any, loaded: Any) -> None:
    found = dict(loaded.named_parameters())
    for name, parameter in saved.named_parameters():
        if relative(found[name].detach().float(), parameter.detach().float()):
            raise Wrong(f"{name} differs")


def _outcome(result: Result, layout: str, options: Options, source: Any, inputs: Inputs, folder: Path) -> str:
    path = folder / layout.replace(" ", "-")
    try:
        plan = make_plan(folder / "source", options)
        run(plan, path, Resources(workers=1, sync=False))
        result.quantized = max(result.quantized, len(plan.units))
        report = verify(path, against=folder / "source")
    except HalfbyteError as error:
        return f"said: refused: {_line(error).replace(str(folder / 'source'), 'SRC')}"
    except Exception as error:
        return f"silent: convert stops with {_crash(error)}"
    said = [*plan.notes, *(problem.text for problem in report.problems if problem.level == "warning")]
    result.notes[layout] = said
    errors = [f"{problem.name}: {problem.text}" for problem in report.problems if problem.level == "error"]
    if errors:
        return f"silent: verify finds errors: {_line(errors[0])}"
    try:
        _check(type(source), source, inputs, path, folder / f"{path.name}-decoded", options.layout != "modelopt")
    except Exception as error:
        text = _line(error) if isinstance(error, Wrong) else _crash(error)
        limits = [note for note in said if READER in note]
        return f"said: {limits[0]} [{text}]" if limits else f"silent: {text}"
    return "computes"


def _check(made: Any, source: Any, inputs: Inputs, path: Path, decoded: Path, reads: bool) -> None:
    """Raise Wrong unless decoded weights are close to the source's, and outputs those of the decoded weights."""
    run(make_plan(path, Options(to="bf16")), decoded, Resources(workers=1, sync=False))
    try:
        reference = load(made, decoded)
    except Exception as error:
        raise Wrong(f"decoded to BF16: {_line(error)}") from error
    _close(source, reference)
    if not reads:
        return
    try:
        loaded = load(made, path)
    except Wrong:
        raise
    except Exception as error:
        raise Wrong(f"loading stops with {_crash(error)}") from error
    try:
        found = compute(loaded, inputs)
    except Exception as error:
        raise Wrong(f"computing stops with {_crash(error)}") from error
    difference = relative(found, compute(reference, inputs))
    if not difference <= EQUAL:
        raise Wrong(f"outputs differ by {difference:.2g} from those of the decoded weights")


def _close(source: Any, reference: Any) -> None:
    """Run-time weights against the source's: finds what is transposed, swapped, not there, or should have been kept."""
    found = dict(reference.named_parameters())
    owners = {
        f"{name}.{own}": module
        for name, module in source.named_modules()
        for own in dict(module.named_parameters(recurse=False))
    }
    head = source.get_output_embeddings()
    for name, parameter in source.named_parameters():
        if name not in found or found[name].shape != parameter.shape:
            raise Wrong(f"decoded to BF16: {name} has another shape or is not there")
        difference = relative(found[name].detach().float(), parameter.detach().float())
        if not difference <= CLOSE:
            raise Wrong(f"decoded to BF16: {name} differs by {difference:.2g} from the source")
        if difference:
            owner = owners[name]
            if parameter.dim() == 2 and not isinstance(owner, torch.nn.Linear):
                raise Wrong(f"{name} is quantized and belongs to no linear layer but to {type(owner).__name__}")
            if owner is head:
                raise Wrong(f"{name} is quantized and is the output head")


def load(made: Any, path: Path) -> Any:
    """The model, if nothing was missing, left over or of another shape."""
    model, info = made.from_pretrained(path, output_loading_info=True)
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(map(str, info.get(kind) or ()))
        if names:
            patterns = dict.fromkeys(re.sub(r"\d+", "N", name) for name in names)
            raise Wrong(f"{len(names)} {kind.replace('_', ' ')}: {', '.join(list(patterns)[:4])}")
    return model.eval()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    if found.shape != wanted.shape:
        return float("inf")
    size = float(wanted.norm())
    return float((found - wanted).norm()) / size if size else float(found.norm())


def _crash(error: BaseException) -> str:
    """What was raised, and where."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [frame for frame in frames if "transformers" in frame.filename or "compressed_tensors" in frame.filename]
    place = f" ({Path(places[-1].filename).name}, {places[-1].name}: {places[-1].line})" if places else ""
    return f"{type(error).__name__}: {_line(error)}{place}"


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]
