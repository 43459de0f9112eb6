"""One layer of sequential GPTQ: linear layers in the order of their use, each with inputs from quantized ones before.

Every batch goes through the layer once, and the same batch of the unquantized model beside it. Both wait before each
group of linear layers with the same input until its weights are decided. A batch that waits holds its intermediate
results; where they do not fit in memory, batches start again at the layer's input for each group instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch

from halfbyte.backends.headroom import by_squared_error
from halfbyte.backends.survey import raised_together
from halfbyte.calibration.collect import FEW
from halfbyte.calibration.layered import Layer
from halfbyte.calibration.moments import Moments, Products, products_of
from halfbyte.calibration.parallel import Workers
from halfbyte.calibration.passage import Passage
from halfbyte.calibration.states import MEMORY, States
from halfbyte.calibration.watch import Watch
from halfbyte.contracts import Contract
from halfbyte.feedback import Factor, gptq, prepare, request_for
from halfbyte.formats import BlockFormat
from halfbyte.methods import Gptq, Optimal
from halfbyte.quantize import dequantize, quantize
from halfbyte.types import QuantizedTensor

HELD = 3
"""What a waiting batch holds, in units of its hidden states and its widest input together. Measured before the last
linear layer of a Llama: 1.6 in windows of 1024 tokens, 2.3 in windows of 256."""


@dataclass(frozen=True)
class Options:
    """How layers are solved, and where."""

    method: Gptq = Gptq()
    device: str = "cpu"
    memory: int = MEMORY
    """Bytes of hidden states and of what waiting batches hold, together, that are kept in memory."""


@dataclass(frozen=True)
class Target:
    """What every weight becomes."""

    format: BlockFormat
    contract: Contract
    groups: Mapping[str, tuple[str, ...]]
    """Module → those that share its tensor scale, itself included."""


class LayerWork:
    """Solves the weights of one layer. The states of both streams move on behind it."""

    def __init__(
        self,
        layer: Layer,
        real: States | None,
        rounded: States,
        aim: Target,
        options: Options,
        workers: Workers,
    ) -> None:
        self.layer, self.copy, self.aim, self.options, self.workers = layer, layer.copy(), aim, options, workers
        self.real, self.rounded = real, rounded
        self.wanted = [name for name in layer.parts if name in aim.groups]
        self.amaxes = self._amaxes()
        """Module → the amax that its tensor scale comes from."""
        self.solved: dict[str, QuantizedTensor] = {}
        self.few: dict[str, int] = {}
        """Experts with too few tokens for second moments → how many they saw."""

    def _amaxes(self) -> dict[str, np.float32]:
        """The largest magnitudes of weights that share a tensor scale, raised by the headroom that Optimal chooses."""
        own = {name: np.float32(float(self.layer.weight(name).abs().max())) for name in self.wanted}
        request = by_squared_error(request_for(self.aim.format, self.aim.contract), self.options.method.headroom)
        found: dict[str, np.float32] = {}
        for name in own:
            if name not in found:
                members = [other for other in self.aim.groups[name] if other in own]
                parts = [self.layer.weight(other).float().cpu().contiguous().numpy() for other in members]
                amax = np.float32(max(own[other] for other in members))
                found |= dict.fromkeys(members, raised_together(parts, amax, lambda dtype: request))
        return found

    def solve(self) -> dict[str, QuantizedTensor]:
        """Every weight of the layer, by its name."""
        groups = schedule(self.layer, self.rounded[0])
        width = max(self.layer.weight(name).shape[1] for name in self.layer.parts)
        streams = [self.rounded] if self.real is None else [self.rounded, self.real]
        held = sum(HELD * 4 * (states.width + width) * states.tokens for states in streams)
        keep = held <= self.options.memory - sum(states.in_memory for states in streams)
        with ExitStack() as stack:
            rounded = [self._passage(stack, self.copy, self.rounded, i) for i in range(len(self.rounded))]
            real = None
            if self.real is not None:
                real = [self._passage(stack, self.layer, self.real, i, False) for i in range(len(self.real))]
            for group in groups:
                wanted = [name for name in group if name in self.aim.groups]
                if wanted:
                    self._group(wanted, self._moments(wanted[0], rounded, real, keep))
            for states, passages in ((self.rounded, rounded), (self.real, real)):
                if states is not None and passages is not None:
                    self._finish(states, passages)
        return self.solved

    def _passage(self, stack: ExitStack, layer: Layer, states: States, number: int, experts: bool = True) -> Passage:
        """A batch that waits before everything that is not decided; in the unquantized model not before experts."""

        def waits(module: str) -> bool:
            open_ = module in self.aim.groups and module not in self.solved
            return open_ and (experts or ".experts." not in module)

        passage = Passage(layer, lambda: states[number], waits)
        stack.callback(passage.forget)
        return passage

    def _finish(self, states: States, passages: list[Passage]) -> None:
        def end(number: int) -> torch.Tensor:
            found = passages[number].finish()
            passages[number].forget()
            return found

        self.workers.trimming(len(states), end, states.__setitem__)

    def _moments(self, module: str, rounded: list[Passage], real: list[Passage] | None, keep: bool) -> Moments | None:
        """Moments of the inputs of a linear layer behind quantized layers, and their cross moments; None: no input.

        keep: batches wait where they are; otherwise each starts again for the next group.
        """
        crossed = real is not None and ".experts." not in module
        moments: Moments | None = None

        def inputs(number: int) -> tuple[torch.Tensor, Products] | None:
            x = rounded[number].to(module)
            before = real[number].to(module) if crossed and real is not None else None
            found = None if x is None else (x, products_of(x, "full", before))
            if not keep:
                rounded[number].forget()
                if real is not None:
                    real[number].forget()
            return found

        def add(number: int, found: tuple[torch.Tensor, Products] | None) -> None:
            nonlocal moments
            if found is not None:
                if moments is None:
                    moments = Moments(found[0].shape[1], "full", found[0].device, cross=crossed)
                moments.add(found[0], products=found[1])

        self.workers.trimming(len(rounded), inputs, add)
        return moments

    def _group(self, names: list[str], moments: Moments | None) -> None:
        """Decide the weights of linear layers with one input, and put their values into the copy."""
        if moments is None:
            factor, tokens = None, 0
        else:
            factor, tokens = self._factor(moments, names[0]), moments.tokens
        if factor is not None:
            self.solved |= self._feedback(names, factor)
        else:
            squares = None if moments is None else moments.finish().mean_squares()
            for name in names:
                self.few |= {name: tokens} if ".experts." in name else {}
                self.solved[name] = self._nearest(self.layer.weight(name), name, squares)
        for name in names:
            place = self.copy.weight(name)
            place.copy_(torch.as_tensor(dequantize(self.solved[name])).to(place.device))

    def _factor(self, moments: Moments, name: str) -> Factor | None:
        """The factor of the moments; None for an expert with too few tokens."""
        if ".experts." in name and moments.tokens < FEW * moments.width:
            return None
        second, cross = moments.means()
        method, block = self.options.method, self.aim.format.block
        if self._on_card:
            return prepare(second, block, method, cross_moment=cross, device=str(second.device), name=name)
        to_host = (second.float().cpu().numpy(), None if cross is None else cross.float().cpu().numpy())
        return prepare(to_host[0], block, method, cross_moment=to_host[1], name=name)

    @property
    def _on_card(self) -> bool:
        """Whether weights are solved on a GPU, which has no descent."""
        return torch.device(self.options.device).type == "cuda" and not self.options.method.descent

    def _feedback(self, names: list[str], factor: Factor) -> dict[str, QuantizedTensor]:
        """The weights of linear layers with one input. A GPU takes those with one tensor scale at once."""
        format, contract = self.aim.format, self.aim.contract
        if not self._on_card:
            found = {}
            for name in names:
                array = self.layer.weight(name).cpu().contiguous().numpy()
                found[name] = gptq(array, factor, format, contract, global_amax=self._amax(name), name=name)
            return found
        alike: dict[np.float32 | None, list[str]] = {}
        for name in names:
            alike.setdefault(self._amax(name), []).append(name)
        return {
            name: one
            for amax, together in alike.items()
            for name, one in self._together(together, factor, amax).items()
        }

    def _together(self, names: list[str], factor: Factor, amax: np.float32 | None) -> dict[str, QuantizedTensor]:
        weights = [self.layer.weight(name) for name in names]
        whole = gptq(torch.cat(weights), factor, self.aim.format, self.aim.contract, global_amax=amax, name=names[0])
        rows = [len(weight) for weight in weights]
        codes, scales = (torch.split(torch.as_tensor(part), rows) for part in (whole.codes, whole.scales))
        return {
            name: replace(whole, shape=tuple(weights[i].shape), codes=codes[i], scales=scales[i])
            for i, name in enumerate(names)
        }

    def _nearest(self, weight: torch.Tensor, name: str, squares: object) -> QuantizedTensor:
        method = Optimal() if squares is None else Optimal(weights=squares)
        array = weight.cpu().contiguous().numpy()
        return quantize(array, self.aim.format, self.aim.contract, method=method, global_amax=self._amax(name))

    def _amax(self, name: str) -> np.float32 | None:
        return self.amaxes[name] if self.aim.format.has_global else None


def schedule(layer: Layer, states: torch.Tensor) -> list[list[str]]:
    """Linear layers with the same input, in the order of their use by one batch.

    Experts are in the place of the first that is used, all of them, in the order of their numbers: layers go through
    those that have tokens in that order.
    """
    groups: list[list[str]] = []
    seen: set[str] = set()

    def visit(module: str, x: torch.Tensor, again: bool) -> None:
        if module not in seen:
            seen.add(module)
            if again and groups:
                groups[-1].append(module)
            else:
                groups.append([module])

    with Watch(layer.places, visit):
        layer(states)
    first = next((number for number, group in enumerate(groups) if ".experts." in group[0]), None)
    if first is None:
        return groups
    before = [group for group in groups[:first] if ".experts." not in group[0]]
    after = [group for group in groups[first:] if ".experts." not in group[0]]
    return [*before, *_experts(layer, groups), *after]


def _experts(layer: Layer, groups: list[list[str]]) -> Iterator[list[str]]:
    """The groups of every expert, as those that were used have them."""

    def split(module: str) -> tuple[int, str]:
        number, _, projection = module.rpartition(".experts.")[2].partition(".")
        return int(number), projection

    names: dict[int, dict[str, str]] = {}
    for module in layer.parts:
        if ".experts." in module:
            number, projection = split(module)
            names.setdefault(number, {})[projection] = module
    used = [[split(module) for module in group] for group in groups if ".experts." in group[0]]
    example = [[projection for _, projection in group] for group in used if group[0][0] == used[0][0][0]]
    for number in sorted(names):
        for projections in example:
            yield [names[number][one] for one in projections if one in names[number]]
