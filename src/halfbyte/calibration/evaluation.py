"""`halfbyte eval`: perplexity, KL to the source and agreement with it, window by window."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from halfbyte.calibration.layered import Layer, LayeredModel
from halfbyte.calibration.parallel import workers_for
from halfbyte.calibration.states import MEMORY, States, batches_of
from halfbyte.calibration.tokens import Windows, check_vocabulary
from halfbyte.calibration.watch import Watch
from halfbyte.calibration.weights import Weights, open_weights
from halfbyte.contracts import get_contract
from halfbyte.formats import BlockFormat, get_format
from halfbyte.quantize import dequantize, quantize
from halfbyte.subnormals import subnormals_kept

SEED, DRAWS, CONFIDENCE = 0, 2000, 0.95
"""Of the bootstrap over windows that gives the intervals."""

ROWS = 8
"""Windows whose logits are held at once."""

Progress = Callable[[int, int], None]
Replace = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Interval:
    """A number with its bootstrap interval over windows. One window has none: low and high are the number then."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Result:
    """A checkpoint compared with its source."""

    perplexity: Interval
    source_perplexity: Interval
    kl: Interval
    """Mean over tokens of KL(source ‖ checkpoint), in nats."""
    top1: Interval
    """Share of tokens whose likeliest next token is that of the source."""
    windows: int
    tokens: int
    """Predicted tokens."""
    activations: str

    def as_json(self) -> dict[str, Any]:
        """As a JSON object; without intervals of a single window."""
        if self.windows == 1:
            parts = {
                name: part | {"low": None, "high": None} for name, part in asdict(self).items() if type(part) is dict
            }
            return asdict(self) | parts | {"interval": None}
        return asdict(self) | {"interval": {"confidence": CONFIDENCE, "bootstrap": DRAWS, "seed": SEED}}


class Rounding:
    """Rounds the inputs of quantized layers as a server does: with the layer's input scale, else with its amax.

    NVFP4 by vLLM's formulas, whose encode factor is one over the input scale; MXFP4 by OCP's.
    """

    def __init__(
        self,
        format: BlockFormat,
        quantized: Callable[[str], bool],
        scales: Mapping[str, float],
        by_window: bool = False,
    ) -> None:
        self.format, self.quantized, self.scales = format, quantized, scales
        self.by_window = by_window
        """Whether some layer takes the amax of what it sees at once, which has to be one window."""
        self.contract = get_contract("vllm" if format.has_global else "ocp", format)

    def __call__(self, module: str, x: torch.Tensor, again: bool) -> torch.Tensor | None:
        if not self.quantized(module):
            return None
        amax = None
        if self.format.has_global:
            scale = self.scales.get(module)
            amax = float(x.abs().max()) if scale is None else scale * 448 * 6
        method = "amax" if self.format.has_global else None
        found = quantize(x.contiguous(), self.format, self.contract, method=method, global_amax=amax)
        return torch.as_tensor(dequantize(found), dtype=x.dtype, device=x.device)


def final_states(
    model: LayeredModel,
    tokens: torch.Tensor,
    replace: Replace | None = None,
    rounding: Rounding | None = None,
    memory: int = MEMORY,
    progress: Callable[[], None] | None = None,
    apart: bool = False,
) -> States:
    """The outputs of the last layer for every window. replace: other values of some weights. apart: see batches_of."""
    with workers_for(model.device) as workers:
        states = States(model.embed, batches_of(tokens, model.device, apart), memory)
        for number in range(len(model.layers)):
            with model.layer(number, replace) as layer:
                states.replace(layer if rounding is None else _rounded(layer, rounding), workers)
            if progress is not None:
                progress()
    return states


def _rounded(layer: Layer, rounding: Rounding) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(states: torch.Tensor) -> torch.Tensor:
        with Watch(layer.places, rounding):
            return layer(states)

    return run


Figures = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""Loss, loss of the source, KL and agreement, each (windows,)."""


def compare(
    source: LayeredModel, before: States, model: LayeredModel, after: States, tokens: torch.Tensor, activations: str
) -> Result:
    """The figures from the last states of both models."""
    return result_of(window_figures(source, before, model, after, tokens), tokens.shape[1], activations)


def window_figures(
    source: LayeredModel, before: States, model: LayeredModel, after: States, tokens: torch.Tensor
) -> npt.NDArray[np.float64]:
    """(windows, 4): loss, loss of the source, KL and share of equal likeliest tokens of each window."""
    table = []
    start = 0
    for real, found in zip(before, after, strict=True):
        for real_row, found_row in zip(torch.split(real, ROWS), torch.split(found, ROWS), strict=True):
            rows = tokens[start : start + len(real_row)].to(model.device)
            start += len(real_row)
            figures = _figures(source.logits(rows, real_row), model.logits(rows, found_row), rows)
            table.append(torch.stack(figures, dim=1).cpu())
    return np.asarray(torch.cat(table).numpy(), np.float64)


def result_of(figures: npt.NDArray[np.float64], length: int, activations: str) -> Result:
    """Means of `window_figures` with their intervals; length: tokens of a window."""
    loss, real_loss, kls, top = (interval(figures[:, i]) for i in range(4))
    return Result(_exp(loss), _exp(real_loss), kls, top, len(figures), len(figures) * (length - 1), activations)


def _figures(real: torch.Tensor, found: torch.Tensor, tokens: torch.Tensor) -> Figures:
    """Means over the predicted tokens of each window, from the logits (windows, length, vocabulary) of both models."""
    wanted = tokens[:, 1:, None]
    same = (real[:, :-1].argmax(dim=-1) == found[:, :-1].argmax(dim=-1)).double()
    real, found = torch.log_softmax(real[:, :-1], dim=-1), torch.log_softmax(found[:, :-1], dim=-1)
    losses = tuple(-one.gather(-1, wanted)[..., 0].double().mean(dim=1) for one in (found, real))
    kl = (real.exp() * (real - found)).sum(dim=-1).double().mean(dim=1)
    return *losses, kl, same.mean(dim=1)  # type: ignore[return-value]


@subnormals_kept()
def evaluate(
    path: Path,
    against: Path,
    windows: Windows,
    *,
    w4a4: bool = False,
    device: str = "cpu",
    progress: Progress | None = None,
) -> Result:
    """Compare a checkpoint with its source on some windows; weights decoded to float32, computed in float32."""
    source, model = LayeredModel(open_weights(against), device), LayeredModel(open_weights(path), device)
    check_vocabulary(windows, min(source.vocabulary, model.vocabulary))
    tokens = torch.from_numpy(windows.tokens)
    total, done = len(source.layers) + len(model.layers), 0

    def step() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, total)

    rounding, words = rounding_of(model.weights) if w4a4 else (None, "not rounded")
    apart = rounding is not None and rounding.by_window
    before = final_states(source, tokens, progress=step, apart=apart)
    after = final_states(model, tokens, rounding=rounding, progress=step, apart=apart)
    return compare(source, before, model, after, tokens, words)


def rounding_of(weights: Weights) -> tuple[Rounding, str]:
    """How a server rounds the inputs of a checkpoint's FP4 layers, and that in words."""
    packed = [name for name in weights.linears if weights.is_packed(name)]
    kinds = {weights.linears[name].kind for name in packed}
    format = get_format("mxfp4" if kinds == {"mxfp4"} else "nvfp4")
    scales = {name: scale for name in packed if (scale := weights.input_scale(name)) is not None}
    by_window = format.has_global and len(scales) < len(packed)
    if format.has_global:
        words = f"NVFP4, input scales of the checkpoint for {len(scales)} of {len(packed)} layers"
        words += ", the others by the amax of each window" if by_window else ""
    else:
        words = "MXFP4, block by block"
    return Rounding(format, weights.is_packed, scales, by_window), words


def interval(values: Any) -> Interval:
    """The mean over windows with a bootstrap interval."""
    values = np.asarray(values, np.float64)
    draws = np.random.default_rng(SEED).integers(0, len(values), (DRAWS, len(values)))
    low, high = np.quantile(values[draws].mean(axis=1), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Interval(float(values.mean()), float(low), float(high))


def _exp(loss: Interval) -> Interval:
    return Interval(math.exp(loss.value), math.exp(loss.low), math.exp(loss.high))
