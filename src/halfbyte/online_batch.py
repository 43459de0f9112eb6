"""Weight sync on a card: all modules of a parameter group in a few launches. Nothing waits for the device.

Modules of one dtype and shape whose groups have equally many members (gate and up, say) go together. Their amaxes are
found, shared and repaired on the device. Results are views of few tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from halfbyte.arrays import DTYPE_NAMES, Array
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
    shape: tuple[int, int]
    """Rows and columns, the same for all."""
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
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for group in groups:
        if len({shapes[at] for at in group}) > 1 or any(shapes[at][1] % format.block for at in group):
            return None
        found.setdefault((len(group), shapes[group[0]]), []).extend(group)
    made = []
    for (share, shape), members in found.items():
        parts = [
            tuple(target.layout.parts(LogicalWeight(names[at], shape[0], shape[1]), format, activations))
            for at in members
        ]
        if any(part.transposed for module in parts for part in module):
            return None
        made.append(Modules(tuple(members), share, (shape[0], shape[1]), tuple(parts)))
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
        rows, columns = modules.shape
        listed = Listed((rows * columns,) * len(modules.at), short, device)
        self.quantizer = ListQuantizer(listed, request, modules.share, target.repairs)

    def __call__(self, tensors: list[torch.Tensor], addresses: list[int]) -> list[list[Named]]:
        """The layout's tensors of each module, under their names."""
        modules, (rows, columns), count = self.modules, self.modules.shape, len(self.modules.at)
        made = self.quantizer(tensors, addresses)
        multiplier = cast("torch.Tensor", made.global_scale)
        values: dict[tuple[str, str, tuple[int, ...]], tuple[torch.Tensor, ...]] = {}
        for part in modules.parts[0]:  # all modules of a batch have the same parts but for the names
            if part.role == "codes":
                whole = made.codes.view(count, rows, -1)
            elif part.role == "scales":
                whole = made.scales.view(count, rows, columns // self.format.block)
                whole = whole if part.dtype == "U8" else whole.view(self._float8())
            elif part.role == "multiplier":
                whole = multiplier.view(count, *part.shape)
            elif part.role == "divisor":
                divisor = made.stored_scale if self.stores_divisor else multiplier.reciprocal()
                whole = cast("torch.Tensor", divisor).view(count, *part.shape)
            else:
                whole = multiplier.new_ones((count, *part.shape))
            values[part.role, part.dtype, part.shape] = whole.unbind(0)
        columns_of = [values[part.role, part.dtype, part.shape] for part in modules.parts[0]]
        return [
            [(part.name, column[index]) for part, column in zip(parts, columns_of, strict=True)]
            for index, parts in enumerate(modules.parts)
        ]

    def _float8(self) -> torch.dtype:
        import torch

        return {"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}[self.format.scale.name]
