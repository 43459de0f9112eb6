"""Casts of tensors on a GPU that keep every code: the bytes stay there, and only five numbers come to the host.

What takes more than that (blocks that do not fit one window, partners, one scale per expert) is cast on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from halfbyte.arrays import is_torch
from halfbyte.backends import choose_backend
from halfbyte.backends.blocks import cast_device_blocks
from halfbyte.casting.measure import decodes_kept, exact_tally, has_negative_zero, reads_zeros_alike
from halfbyte.casting.report import CastReport, ShareCost
from halfbyte.casting.rows import HALF
from halfbyte.casting.scales import NVFP4, GlobalScale, power
from halfbyte.casting.to_nvfp4 import Settings, describe_scaled
from halfbyte.casting.verbatim import midpoint
from halfbyte.casting.window import BIAS, NO_BLOCKS, Exponents
from halfbyte.methods import Amax
from halfbyte.on_device import device_of
from halfbyte.request import resolve_decoding
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

KEEPING = ("optimal", "hybrid", "verbatim")
"""Algorithms that keep all codes where one window holds all blocks."""

SIGNLESS = 0x7777777777777777


def keep_on_device(
    tensors: Sequence[QuantizedTensor], share: str, settings: Settings
) -> tuple[QuantizedTensor, CastReport] | None:
    """The cast of one tensor of whole blocks that all fit one window, where it lies; None where that is not so."""
    if len(tensors) != 1 or share != "tensor" or settings.algorithm not in KEEPING:
        return None
    (source,) = tensors
    codes, scales = source.codes, source.scales
    if not (is_torch(codes) and is_torch(scales)) or not codes.numel():
        return None
    if source.format.block != 2 * HALF or source.shape[-1] % source.format.block:
        return None
    request = resolve_decoding(source.format, source.contract, source.method, device=device_of(codes))
    if not choose_backend(settings.backend, request, decoding=True).takes_tensors:
        return None
    lowest, highest, least, most, used = _look(codes, scales)
    exponents = Exponents(least - BIAS, most - BIAS) if used else None
    m = midpoint(exponents) if settings.algorithm == "verbatim" else (exponents or NO_BLOCKS).m
    if highest == 255 or not Exponents(lowest - BIAS, highest - BIAS).fit_under(m):
        return None  # refused there, or snapped
    scale = power(m, settings.contract)
    if not decodes_kept(scale, m, exponents):
        return None  # measured there
    new_codes, new_scales, _ = cast_device_blocks(codes, scales, BIAS + m)
    blocks = scales.numel()
    same_bits = reads_zeros_alike(source, settings.contract) or not has_negative_zero(codes)
    tally = exact_tally(blocks, blocks - used, blocks * 2 * HALF, same_bits)
    report = describe_scaled(tally, source.shape, settings, exponents, [scale], 0.0)
    return _assemble(source, new_codes, new_scales, scale), replace(report, costs=_costs(source, blocks))


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


def _costs(source: QuantizedTensor, blocks: int) -> tuple[ShareCost, ...]:
    """A stack could have one scale per expert: what fits all fits a part."""
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

    return QuantizedTensor.trusted(
        format=NVFP4,
        shape=source.shape,
        codes=codes,
        scales=scales,
        global_scale=filled(float(scale.multiplier)),
        stored_scale=filled(float(scale.stored)),
        contract=scale.contract,
        method=Amax(),
    )
