"""Weight sync on a card: all modules of a parameter group in a few launches. Nothing waits for the device.

Groups whose members have the same shapes (gate and up of every expert, say) go together, in one dtype. Their amaxes are
found, shared and repaired on the device, and the headroom of Optimal is chosen there. Results are views of few tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from halfbyte.arrays import DTYPE_NAMES, Array
from halfbyte.backends import Parts
from halfbyte.backends.gpu import Listed, ListQuantizer
from halfbyte.checkpoint.plan.target import Target
from halfbyte.contracts import NVFP4Rule
from halfbyte.layouts.description import Activations, LogicalWeight, Part
from halfbyte.request import resolve

if TYPE_CHECKING:
    import torch

Named = tuple[str, Array]


@dataclass(frozen=True)
class Modules:
    """The weights that one batch takes: places among the pairs, partners side by side, and their common form."""

    at: tuple[int, ...]
    share: int
    shapes: tuple[tuple[int, int], ...]
    """Rows and columns of each; those of one group are those of every other."""
    parts: tuple[tuple[Part, ...], ...]
    """The layout's tensors of each module."""


def batches(
    names: tuple[str, ...], shapes: list[tuple[int, ...]], groups: Iterable[tuple[int, ...]], target: Target,
    activations: Activations,
) -> list[Modules] | None:  # fmt: skip
    """Weights in batches of one shape. None: this format, contract or shape has to be quantized one by one."""
    format, contract = target.format, target.contract
    if format is None or contract is None or not format.has_global:
        return None
    rule = contract.rule(format)
    transform = contract.transform
    if not isinstance(rule, NVFP4Rule) or rule.stored is None or transform.hadamard or transform.columnwise:
        return None
    found: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for group in groups:
        if any(shapes[at][1] % format.block for at in group):
            return None
        found.setdefault(tuple(tuple(shapes[at]) for at in group), []).extend(group)
    made = []
    for of_group, members in found.items():
        own = tuple((shapes[at][0], shapes[at][1]) for at in members)
        parts = [
            tuple(target.layout.parts(LogicalWeight(names[at], *shape), format, activations))
            for at, shape in zip(members, own, strict=True)
        ]
        if any(part.transposed for module in parts for part in module):
            return None
        made.append(Modules(tuple(members), len(of_group), own, tuple(parts)))
    return made


class BatchQuantizer:
    """Quantizes the modules of one batch on one device."""

    def __init__(self, modules: Modules, target: Target, dtype: torch.dtype, device: torch.device) -> None:
        if target.format is None or target.contract is None:
            raise TypeError("a batch has a format and a contract")
        short = DTYPE_NAMES[str(dtype).removeprefix("torch.")]
        request = resolve(target.format, target.contract, target.method, dtype=short, device="cuda")
        rule = request.rule
        self.modules, self.format, self.device = modules, request.format, device
        self.stores_divisor = isinstance(rule, NVFP4Rule) and rule.stored_as == "encode factor"
        listed = Listed(tuple(rows * columns for rows, columns in modules.shapes), short, device)
        self.quantizer = ListQuantizer(listed, request, modules.share, target.repairs)

        self.names = [[module[column].name for module in modules.parts] for column in range(len(modules.parts[0]))]
        """Of each part of the layout: the names of all modules' tensors."""

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: tuple[int, ...]) -> Parts[torch.Tensor]:
        """Launch the kernels."""
        return self.quantizer(tensors, addresses)

    def name_into(self, named: list[Named], made: Parts[torch.Tensor]) -> None:
        """Append the tensors under their names: one part of the layout for all modules, then the next."""
        with untracked():
            for part, names in zip(self.modules.parts[0], self.names, strict=True):
                named.extend(zip(names, self._of_each(part, made), strict=True))

    def _of_each(self, part: Part, made: Parts[torch.Tensor]) -> Sequence[torch.Tensor]:
        """One part of the layout, for each module. All have the same parts but for names and shapes."""
        count = len(self.modules.at)
        multiplier = cast("torch.Tensor", made.global_scale)
        match part.role:
            case "codes":
                return self._matrices(made.codes, self.format.codes_per_byte)
            case "scales":
                scales = made.scales if part.dtype == "U8" else made.scales.view(self._float8())
                return self._matrices(scales, self.format.block)
            case "multiplier":
                return multiplier.view(count, *part.shape).unbind(0)
            case "divisor":
                divisor = made.stored_scale if self.stores_divisor else multiplier.reciprocal()
                return cast("torch.Tensor", divisor).view(count, *part.shape).unbind(0)
        return multiplier.new_ones((count, *part.shape)).unbind(0)

    def _matrices(self, flat: torch.Tensor, per: int) -> Sequence[torch.Tensor]:
        """The matrices of all modules, which follow each other: an entry stands for `per` elements."""
        shapes = self.modules.shapes
        if len({columns for _, columns in shapes}) == 1:
            return flat.view(-1, shapes[0][1] // per).split_with_sizes([rows for rows, _ in shapes])
        parts = flat.split_with_sizes([rows * columns // per for rows, columns in shapes])
        return [matrix.view(rows, -1) for matrix, (rows, _) in zip(parts, shapes, strict=True)]

    def _float8(self) -> torch.dtype:
        import torch

        return {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}[self.format.scale.name]


def untracked() -> AbstractContextManager[object]:
    """Views that are made here are ordinary tensors to autograd, not views. They take two thirds of the time to make.

    Nothing of the results requires a gradient, and nobody has the tensors they are parts of.
    """
    import torch

    guard = getattr(torch._C, "_AutoDispatchBelowADInplaceOrView", None)
    return nullcontext() if guard is None else cast("AbstractContextManager[object]", guard())


class Batches:
    """All batches of a parameter group on one device, and the order of the results."""

    def __init__(
        self, modules: list[Modules], pairs: int, target: Target, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.quantizers = [BatchQuantizer(batch, target, dtype, device) for batch in modules]
        places: dict[int, list[int]] = {}
        before = 0
        for batch in modules:
            count, columns = len(batch.at), len(batch.parts[0])
            for index, at in enumerate(batch.at):
                places[at] = [before + column * count + index for column in range(columns)]
            before += count * columns
        self._order = operator.itemgetter(*(place for at in range(pairs) for place in places.get(at, [before + at])), 0)
        self._members = [operator.itemgetter(*batch.at, batch.at[0]) for batch in modules]

    def __call__(self, pairs: list[Named], tensors: list[torch.Tensor], addresses: list[int]) -> list[Named]:
        """The results. `tensors`, `addresses`: of all pairs. All kernels are launched before any result is named."""
        made = []
        for quantizer, members in zip(self.quantizers, self._members, strict=True):
            made.append(quantizer(members(tensors)[:-1], members(addresses)[:-1]))
        flat: list[Named] = []
        for quantizer, parts in zip(self.quantizers, made, strict=True):
            quantizer.name_into(flat, parts)
        flat += pairs
        return list(self._order(flat)[:-1])
