"""Casts of tensors on a GPU that keep every code: the bytes stay there, and only five numbers come to the host.

What takes more than that (blocks that do not fit one window, partners, a scale an expert) is cast on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from halfbyte.arrays import is_torch
from halfbyte.backends import choose_backend
from halfbyte.backends.gpu import cast_scales
from halfbyte.casting.move import HIGHEST, LOWEST, WINDOW
from halfbyte.casting.operand import HALF
from halfbyte.casting.report import CastReport, ShareCost, Tally, describe
from halfbyte.casting.scales import NVFP4, GlobalScale, power
from halfbyte.casting.to_nvfp4 import Settings
from halfbyte.on_device import device_of
from halfbyte.request import resolve_decoding
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

KEEPING = ("optimal", "hybrid", "verbatim")
"""Algorithms that keep all codes where one window holds all blocks."""

SIGNLESS = 0x7777777777777777
BIAS = 127


def keep_on_device(
    tensors: Sequence[QuantizedTensor], share: str, settings: Settings
) -> tuple[QuantizedTensor, CastReport] | None:
    """The cast of one tensor of whole blocks that all fit one window, where it lies; None where that is not so."""
    if len(tensors) != 1 or share != "tensor" or settings.algorithm not in KEEPING:
        return None
    (source,) = tensors
    codes, scales = source.codes, source.scales
    if not (is_torch(codes) and is_torch(scales)) or codes.numel() != HALF * scales.numel() or not codes.numel():
        return None
    if source.format.block != 2 * HALF or source.shape[-1] != scales.shape[-1] * source.format.block:
        return None
    request = resolve_decoding(source.format, source.contract, source.method, device=device_of(codes))
    if not choose_backend(settings.backend, request, decoding=True).takes_tensors:
        return None
    lowest, highest, least, most, used = _look(codes, scales)
    exponents = (least - BIAS, most - BIAS) if used else None
    m = _place(exponents, settings.algorithm)
    window = range(BIAS + m + LOWEST, BIAS + m + HIGHEST + 1)
    if highest == 255 or lowest not in window or highest not in window:
        return None  # refused there, or snapped
    scale = power(m, settings.contract)
    new_codes, new_scales, _ = cast_scales(codes, scales, BIAS + m)
    blocks = scales.numel()
    tally = Tally(blocks, blocks - used, used, 0, 0, 0.0, 0.0, 0.0, blocks * 2 * HALF, True)
    report = describe(
        tally,
        source="mxfp4",
        target="nvfp4",
        algorithm=settings.described,
        shape=source.shape,
        exponents=exponents,
        m=scale.exponent,
        global_scales=(float(scale.multiplier),),
        bound=0.0,
        costs=_costs(source, blocks),
    )
    return _assemble(source, new_codes, new_scales, scale), report


def _look(codes: torch.Tensor, scales: torch.Tensor) -> tuple[int, int, int, int, int]:
    """Smallest and largest scale byte of all blocks, the same of those that are not zero, and how many those are."""
    import torch

    flat = scales.reshape(-1)
    used = ((codes.contiguous().view(torch.int64).reshape(-1, 2) & SIGNLESS) != 0).any(dim=1)
    numbers = [
        flat.amin(), flat.amax(), torch.where(used, flat, 255).amin(), torch.where(used, flat, 0).amax(), used.sum(),
    ]  # fmt: skip
    found = torch.stack([number.to(torch.int64) for number in numbers]).tolist()
    return found[0], found[1], found[2], found[3], found[4]


def _place(exponents: tuple[int, int] | None, algorithm: str) -> int:
    """m as the algorithms choose it where all blocks fit; too wide a range gives an m that some block does not fit."""
    if exponents is None:
        return 0
    low, high = exponents
    return (low + high + 1) // 2 if algorithm == "verbatim" else high - (LOWEST + WINDOW)


def _costs(source: QuantizedTensor, blocks: int) -> tuple[ShareCost, ...]:
    """A stack could have a scale an expert: what fits all fits a part."""
    if len(source.shape) < 3:
        return ()
    whole = ShareCost("tensor", 1, True, blocks, 0.0)
    return whole, replace(whole, share="expert", scales=source.shape[0])


def _assemble(
    source: QuantizedTensor, codes: torch.Tensor, scales: torch.Tensor, scale: GlobalScale
) -> QuantizedTensor:
    import torch

    def filled(value: float) -> torch.Tensor:
        return torch.full((), value, dtype=torch.float32, device=codes.device)

    return QuantizedTensor(
        format=NVFP4,
        shape=source.shape,
        codes=codes,
        scales=scales,
        global_scale=filled(float(scale.multiplier)),
        stored_scale=filled(float(scale.stored)),
        contract=scale.contract,
    )
