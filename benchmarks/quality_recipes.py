"""Ways to quantize the linear layers of a model, for benchmarks/quality.py: decoded weights by module."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import halfbyte as hb
from halfbyte.arrays import to_numpy
from halfbyte.backends.cpu.library import load_library
from halfbyte.backends.headroom import by_squared_error
from halfbyte.backends.survey import raised_together
from halfbyte.calibration.collect import Options as Collecting
from halfbyte.calibration.collect import calibrate
from halfbyte.calibration.sequential import Options as Solving
from halfbyte.calibration.sequential import solve_sequentially
from halfbyte.calibration.smooth import fit_smoothing
from halfbyte.calibration.tokens import Windows
from halfbyte.calibration.weights import open_weights
from halfbyte.checkpoint import Options, make_plan
from halfbyte.feedback import prepare, request_for
from halfbyte.smoothing import Smoothing

Values = dict[str, torch.Tensor]
LAYOUTS = {"nvfp4": "modelopt", "mxfp4": "compressed-tensors"}
GRID = torch.tensor([-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6])


class SkippedError(Exception):
    """A row that cannot be computed here, with the reason."""


@dataclass(frozen=True)
class Recipe:
    """A row of the table."""

    name: str
    format: str
    make: Callable[[Scene], Values]
    activations: bool = False
    """Whether it is measured with rounded activations too."""
    code: bool = True
    """Whether it is measured on code too."""
    smooth: bool = False
    """Whether the model is smoothed first, for W4A4 if activations are rounded."""

    @property
    def sequential(self) -> bool:
        """Whether it runs the model layer by layer, which only decoders can."""
        return getattr(self.make, "__qualname__", "").startswith("sequential.")


class Scene:
    """A model with everything that recipes need: its linear weights, whose amax they have, and statistics."""

    def __init__(
        self, source: Path, text: Windows, device: str, smoothing: Smoothing | None = None, folder: Path | None = None
    ) -> None:
        self.source, self.text, self.device, self.smoothing = source, text, torch.device(device), smoothing
        self.folder = folder or Path(tempfile.mkdtemp(prefix="halfbyte-quality-"))
        self.plans = {
            format: make_plan(source, Options(format, layout, smoothing=smoothing))
            for format, layout in LAYOUTS.items()
        }
        weights = open_weights(source, smoothing)
        names = [unit.module for unit in self.plans["nvfp4"].units if unit.action == "quantize"]
        self.weights = {name: torch.from_numpy(weights.matrix(name)).to(self.device) for name in names}
        self.groups = {name: group for group in self.plans["nvfp4"].groups for name in group}
        self._raised: dict[tuple[str, ...], float] = {}
        self._statistics: Any = None
        self._smoothed: dict[tuple[bool, str], Scene] = {}

    def amax(self, name: str, format: str) -> float | None:
        """The amax that the tensor scale of a weight comes from."""
        if format != "nvfp4":
            return None
        return max(float(self.weights[other].abs().max()) for other in self.groups.get(name, (name,)))

    def raised(self, name: str, format: str) -> float | None:
        """The same with the headroom that `optimal`, `hessian` and `gptq` have in `halfbyte convert`."""
        own, group = self.amax(name, format), self.groups.get(name, (name,))
        if own is None:
            return None
        if group not in self._raised:
            request = by_squared_error(request_for(format, self.contract(format)), None)
            members = [self.weights[other].cpu().numpy() for other in group]
            self._raised[group] = float(raised_together(members, np.float32(own), lambda dtype: request))
        return self._raised[group]

    def contract(self, format: str) -> Any:
        return self.plans[format].contract

    def statistics(self) -> Any:
        """Those of the unquantized model, computed on the first call."""
        if self._statistics is None:
            self._statistics = calibrate(self.source, self.text, self.folder, Collecting("full", str(self.device)))
        return self._statistics

    def input_amax(self, name: str) -> float:
        """The largest input of a linear layer in the calibration."""
        return float(self.known(name).input_amax)

    def smoothed(self, activations: bool = True, format: str = "nvfp4") -> Scene:
        """The same with the factors of `convert --smooth` folded in; the statistics stay.

        activations: whether they are rounded too, as with `--activations stats`.
        """
        if (activations, format) in self._smoothed:
            return self._smoothed[activations, format]
        rounded = activations and format == "nvfp4"
        plan = make_plan(self.source, Options(format, LAYOUTS[format], activations="unit" if rounded else "none"))
        factors = fit_smoothing(plan, self.statistics())
        found = Scene(self.source, self.text, str(self.device), factors, self.folder)
        found._statistics = self.statistics()
        self._smoothed[activations, format] = found
        return found

    def inputs(self) -> dict[str, list[str]]:
        """Linear layer → all that have its input, itself first."""
        found: dict[str, list[str]] = {}
        for name in self.weights:
            found.setdefault(self.statistics().stored_as(name), []).append(name)
        return found

    def moment(self, name: str) -> torch.Tensor:
        return torch.from_numpy(self.known(name).second_moment).to(self.device)

    def known(self, name: str) -> Any:
        """The statistics of a layer's input, divided by the factors of smoothing."""
        found = self.statistics().get(name)
        if self.smoothing is not None and name in self.smoothing.columns:
            found = found.divided(self.smoothing.columns[name])
        return found


def as_given(weight: torch.Tensor) -> Any:
    """A weight as the library takes it fastest: numpy on the host, a tensor on a GPU."""
    return weight if weight.is_cuda else weight.numpy()


def decoded(q: Any, like: torch.Tensor) -> torch.Tensor:
    return torch.as_tensor(np.array(found) if isinstance(found := hb.dequantize(q), np.ndarray) else found).to(
        like.device
    )


def plain(format: str, method: Any) -> Callable[[Scene], Values]:
    """Scales by a method that needs no statistics."""

    def make(scene: Scene) -> Values:
        found = {}
        for name, weight in scene.weights.items():
            amax = scene.raised(name, format) if method == "optimal" else scene.amax(name, format)
            q = hb.quantize(as_given(weight), format, scene.contract(format), method, global_amax=amax)
            found[name] = decoded(q, weight)
        return found

    return make


def hessian(format: str) -> Callable[[Scene], Values]:
    """Scales by the blocks of the second moments, nearest codes."""
    block = hb.get_format(format).block

    def make(scene: Scene) -> Values:
        found = {}
        for first, names in scene.inputs().items():
            h = scene.moment(first)
            count = len(h) // block
            at = torch.arange(count, device=h.device)
            squares = h.reshape(count, block, count, block)[at, :, at, :]
            method = hb.Hessian(((squares + squares.mT) / 2).cpu().numpy())
            for name in names:
                weight, amax = scene.weights[name], scene.raised(name, format)
                q = hb.quantize(as_given(weight), format, scene.contract(format), method, global_amax=amax)
                found[name] = decoded(q, weight)
        return found

    return make


def by_statistics(format: str, method: hb.Gptq) -> Callable[[Scene], Values]:
    """`halfbyte convert --method gptq --stats`."""
    block = hb.get_format(format).block

    def make(scene: Scene) -> Values:
        found = {}
        on_card = scene.device.type == "cuda" and not method.descent
        for first, names in scene.inputs().items():
            device = str(scene.device) if on_card else None
            h = scene.moment(first)
            factor = prepare(h if on_card else h.cpu().numpy(), block, method, device=device, name=first)
            for name in names:
                weight, amax = scene.weights[name], scene.raised(name, format)
                given = weight if on_card else weight.cpu().numpy()
                q = hb.gptq(given, factor, format, scene.contract(format), global_amax=amax)
                found[name] = decoded(q, weight)
        return found

    return make


def sequential(format: str, method: hb.Gptq, windows: int | None = None) -> Callable[[Scene], Values]:
    """`halfbyte convert --method gptq --calibrate`."""

    def make(scene: Scene) -> Values:
        found: Values = {}
        if method.descent and load_library() is None:
            raise RuntimeError("the descent runs on the host, and its compiled kernels are missing")
        text = scene.text if windows is None else Windows(scene.text.tokens[:windows], scene.text.sha256)
        with tempfile.TemporaryDirectory(prefix="halfbyte-quality-") as folder:
            options = Solving(method, str(scene.device), 64 << 30)
            solve_sequentially(
                scene.plans[format], text, Path(folder) / "solved", options,
                visit=lambda name, values: found.__setitem__(name, values.clone()),
            )  # fmt: skip
        return found

    return make


def textbook(scene: Scene) -> Values:
    """GPTQ as its paper has it: the scales of amax, blocks of NVFP4 from left to right, damping 0.01."""
    found = {}
    for first, names in scene.inputs().items():
        h = scene.moment(first).double()
        h.diagonal().add_(0.01 * h.diagonal().mean())
        upper = torch.linalg.cholesky(torch.linalg.inv(h), upper=True).float()
        for name in names:
            found[name] = _textbook(scene.weights[name], upper, scene.amax(name, "nvfp4"), scene.contract("nvfp4"))
    return found


def _textbook(weight: torch.Tensor, upper: torch.Tensor, amax: float | None, contract: Any) -> torch.Tensor:
    w, out, block = weight.clone(), torch.empty_like(weight), 16
    grid = GRID.to(w.device)
    steps_of = torch.from_numpy(np.nan_to_num(hb.get_format("nvfp4").scale.values)).float().to(w.device)
    for start in range(0, w.shape[1], 8 * block):
        stop = min(w.shape[1], start + 8 * block)
        errors = torch.empty((len(w), stop - start), device=w.device)
        for first in range(start, stop, block):
            q = hb.quantize(
                as_given(w[:, first : first + block].contiguous()), "nvfp4", contract, "amax", global_amax=amax
            )
            assert q.global_scale is not None
            bytes_ = torch.as_tensor(q.scales).long().to(w.device)[:, 0]
            step = steps_of[bytes_] * float(to_numpy(q.global_scale))
            for j in range(first, first + block):
                near = torch.bucketize(w[:, j] / step.clamp(min=1e-30), (grid[1:] + grid[:-1]) / 2)
                out[:, j] = grid[near] * step
                errors[:, j - start] = (w[:, j] - out[:, j]) / upper[j, j]
                w[:, j + 1 : stop] -= errors[:, j - start, None] * upper[j, j + 1 : stop]
        w[:, stop:] -= errors @ upper[start:stop, stop:]
    return out


def recipes() -> list[Recipe]:
    """The rows, in the order of the table."""
    G = hb.Gptq
    rows = [
        Recipe("amax", "nvfp4", plain("nvfp4", "amax"), True),
        Recipe("four_six", "nvfp4", plain("nvfp4", "four_six")),
        Recipe("optimal", "nvfp4", plain("nvfp4", "optimal"), True),
        Recipe("hessian, by statistics", "nvfp4", hessian("nvfp4")),
        Recipe("gptq, scales of amax (textbook)", "nvfp4", textbook),
        Recipe("gptq, Hessian scales, left to right", "nvfp4", by_statistics("nvfp4", G(order="given"))),
        Recipe("gptq --stats: blocks in order", "nvfp4", by_statistics("nvfp4", G()), True),
        Recipe("sequential, asymmetry 0", "nvfp4", sequential("nvfp4", G(asymmetry=0))),
        Recipe("gptq --calibrate: asymmetry 0.5", "nvfp4", sequential("nvfp4", G()), True),
        Recipe("sequential, asymmetry 0.75", "nvfp4", sequential("nvfp4", G(asymmetry=0.75))),
        Recipe("sequential, asymmetry 1", "nvfp4", sequential("nvfp4", G(asymmetry=1.0))),
        Recipe("sequential, 0.75, damping 0.01", "nvfp4", sequential("nvfp4", G(asymmetry=0.75, damping=0.01))),
        Recipe("sequential, asymmetry 0.5, one sweep of descent", "nvfp4", sequential("nvfp4", G(descent=1))),
        Recipe("optimal --smooth", "nvfp4", plain("nvfp4", "optimal"), True, smooth=True),
        Recipe("gptq --stats --smooth", "nvfp4", by_statistics("nvfp4", G()), True, smooth=True),
        Recipe("gptq --calibrate --smooth", "nvfp4", sequential("nvfp4", G()), True, smooth=True),
        Recipe("gptq --calibrate --smooth for W4A16", "nvfp4", sequential("nvfp4", G()), smooth=True),
        Recipe("amax", "mxfp4", plain("mxfp4", "amax"), True),
        Recipe("optimal", "mxfp4", plain("mxfp4", "optimal"), True),
        Recipe("hessian, by statistics", "mxfp4", hessian("mxfp4")),
        Recipe("gptq --stats", "mxfp4", by_statistics("mxfp4", G()), True),
        Recipe("gptq --calibrate", "mxfp4", sequential("mxfp4", G()), True),
    ]  # fmt: skip
    return rows
