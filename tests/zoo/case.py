"""One class: built, saved, converted in three layouts, verified, loaded by transformers, computed."""

from __future__ import annotations

import re
import shutil
import traceback
from collections.abc import Mapping, Sequence
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
THEN = "; and so: "
"""Between a limit that was said and what transformers then did."""
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
    share: dict[str, float] = field(default_factory=dict)
    """How much of the linear layers and stacked experts is quantized, by elements."""
    outcomes: dict[str, str] = field(default_factory=dict)
    notes: dict[str, list[str]] = field(default_factory=dict)
    alarms: dict[str, str] = field(default_factory=dict)
    """Limits of transformers that were said of a model that it computes."""
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def silent(self) -> bool:
        return any(outcome.startswith("silent") for outcome in self.outcomes.values())


class Unread(Exception):
    """What transformers did with a checkpoint instead of reading it. No failure if it was said beforehand."""


class Wrong(Exception):
    """What is wrong in the files themselves. No word beforehand excuses it."""


def examine(name: str, folder: Path) -> Result:
    """Everything about one class; `folder` is new and is removed."""
    result = Result(name)
    try:
        source, inputs = _source(result, folder / "source")
    except (Unbuildable, NoInputs) as error:
        text = _line(error).replace(str(folder / "source"), "SRC")
        result.outcomes = dict.fromkeys(LAYOUTS, f"unbuildable: {text}")
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
            raise Unread(f"{name} differs")


def _outcome(result: Result, layout: str, options: Options, source: Any, inputs: Inputs, folder: Path) -> str:
    path = folder / layout.replace(" ", "-")
    decoded = folder / f"{path.name}-decoded"
    try:
        plan = make_plan(folder / "source", options)
        run(plan, path, Resources(workers=1, sync=False))
        report = verify(path, against=folder / "source")
        back = make_plan(path, Options(to="bf16"))
        run(back, decoded, Resources(workers=1, sync=False))
    except HalfbyteError as error:
        return f"said: refused: {_line(error).replace(str(folder / 'source'), 'SRC')}"
    except Exception as error:
        return f"silent: convert stops with {_crash(error)}"
    said = [*plan.notes, *back.notes, *(problem.text for problem in report.problems if problem.level == "warning")]
    limits = reader_limits(said)
    result.notes[layout] = said
    errors = [f"{problem.name}: {problem.text}" for problem in report.problems if problem.level == "error"]
    if errors:
        return f"silent: verify finds errors: {_line(errors[0])}"
    try:
        reference = load(type(source), decoded, "decoded to BF16: ")
        result.share[layout] = quantized_share(source, reference)
        if options.layout != "modelopt":
            _equal(load(type(source), path), reference, inputs)
    except Unread as error:
        return judged(error, limits)
    except Wrong as error:
        return f"silent: {_line(error)}"
    if limits and options.layout != "modelopt":
        result.alarms[layout] = limits[0]
    return "computes"


def reader_limits(said: Sequence[str]) -> list[str]:
    return [text for text in said if READER in text]


def judged(error: Unread, limits: Sequence[str]) -> str:
    """What transformers did, and whether one knew."""
    return f"said: {limits[0]}{THEN}{_line(error)}" if limits else f"silent: {_line(error)}"


def quantized_share(source: Any, reference: Any) -> float:
    """Run-time weights against the source's: finds what is transposed, swapped, not there, or should have been kept.

    The result is the share of elements that are quantized.
    """
    found = dict(reference.named_parameters())
    head = source.get_output_embeddings()
    quantized = linear = 0
    for name, parameter in source.named_parameters():
        if name not in found or found[name].shape != parameter.shape:
            raise Wrong(f"decoded to BF16: {name} has another shape or is not there")
        difference = relative(found[name].detach().float(), parameter.detach().float())
        if not difference <= CLOSE:
            raise Wrong(f"decoded to BF16: {name} differs by {difference:.2g} from the source")
        owner = source.get_submodule(name.rpartition(".")[0])
        stacked = parameter.dim() == 3 and "Conv" not in type(owner).__name__
        if stacked or (parameter.dim() == 2 and isinstance(owner, torch.nn.Linear)):
            linear += parameter.numel()
            quantized += parameter.numel() if difference else 0
        elif difference:
            raise Wrong(f"{name} is quantized and belongs to no linear layer but to {type(owner).__name__}")
        if difference and owner is head:
            raise Wrong(f"{name} is quantized and is the output head")
    return round(quantized / max(linear, 1), 3)


def load(made: Any, path: Path, when: str = "") -> Any:
    """The model, if nothing was missing, left over or of another shape."""
    try:
        model, info = made.from_pretrained(path, output_loading_info=True)
    except Exception as error:
        raise Unread(f"{when}loading stops with {_crash(error)}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        names = sorted(map(str, info.get(kind) or ()))
        if names:
            patterns = dict.fromkeys(re.sub(r"\d+", "N", name) for name in names)
            raise Unread(f"{when}{len(names)} {kind.replace('_', ' ')}: {', '.join(list(patterns)[:4])}")
    return model.eval()


def _equal(loaded: Any, reference: Any, inputs: Inputs) -> None:
    """Raise unless the outputs are those of the decoded weights."""
    try:
        found = compute(loaded, inputs)
    except Exception as error:
        raise Unread(f"computing stops with {_crash(error)}") from error
    difference = relative(found, compute(reference, inputs))
    if not difference <= EQUAL:
        raise Unread(f"outputs differ by {difference:.2g} from those of the decoded weights")


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
