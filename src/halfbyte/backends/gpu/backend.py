"""The GPU backend: checks and launches. Tensors stay on the device, and nothing waits for it.

torch and triton are imported when a tensor comes. The bits are the reference's: the kernels compute the contract's
formulas in the reference's order (triton/*.py, cuda/*.cu), and choose.py lists what they were written for.
"""

from __future__ import annotations

import importlib.util
import os
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import ChosenKernel, choose, choose_decoder
from halfbyte.backends.gpu.constants import WORDS
from halfbyte.backends.gpu.dispatch import OWN, TENSOR, VALUE
from halfbyte.backends.gpu.driver.commands import Slot
from halfbyte.backends.gpu.driver.run import run
from halfbyte.backends.gpu.hadamard import rotated
from halfbyte.backends.gpu.launch import Matrix
from halfbyte.backends.gpu.operand import (
    aligned,
    check_device,
    dtype_name_of,
    on_device,
    outputs,
    readable,
    row_quads,
)
from halfbyte.backends.gpu.programs import decoding_for, quantization_for, survey_for
from halfbyte.backends.gpu.small import Small
from halfbyte.backends.headroom import Sample, Trial
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.errors import BackendError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


def interpreting() -> bool:
    """Whether Triton runs its kernels as numpy on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


class Gpu:
    """Quantizes and decodes CUDA tensors, by Triton and CUDA C++ kernels."""

    name = "gpu"
    takes_tensors = True

    def supports(self, request: Request) -> Reason | None:
        return _device_reason(request.device) or _reason(choose(request))

    def supports_decoding(self, request: Request) -> Reason | None:
        return _device_reason(request.device) or _reason(choose_decoder(request))

    def quantize(
        self,
        x: torch.Tensor,
        request: Request,
        amax: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Parts[torch.Tensor]:
        """Quantize a (rows, K) matrix on its device."""
        return quantize_matrix(x, request, amax, out)

    def dequantize(
        self,
        parts: Parts[torch.Tensor],
        shape: tuple[int, int],
        request: Request,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode a (rows, K) matrix on its device."""
        import torch
        import torch.nn.functional as functional

        codes, scales, stored_scale = parts.codes, parts.scales, parts.stored_scale
        decoder = choose_decoder(request)
        if isinstance(decoder, Reason):
            raise BackendError(f"backend gpu cannot do this: {decoder}")
        check_device(codes)
        format, (rows, width) = request.format, shape
        whole = ceil_div(width, format.block) * format.block
        with on_device(codes):
            if whole != width:
                missing = whole // format.codes_per_byte - codes.shape[1]
                codes = functional.pad(codes, (0, missing))
            codes, scales = aligned(codes), scales.contiguous()
            fits = out is not None and whole == width and out.is_contiguous() and out.data_ptr() % 16 == 0
            values = out if out is not None and fits else torch.empty((rows, whole), dtype=dtype, device=codes.device)
            stored = None
            if decoder.decode is not None and stored_scale is not None:
                stored = stored_scale.reshape(-1).contiguous()
            count = 0 if stored is None else stored.numel()
            program = decoding_for(decoder, request, rows, whole, count, dtype_name_of(dtype), codes.device)
            given = scales if stored is None else stored
            run(program, codes.device, {Slot.X: values, Slot.CODES: codes, Slot.SCALES: scales, Slot.GIVEN: given})
        if values is out:
            return values
        values = values[:, :width] if whole != width else values
        return values.contiguous() if out is None else out.copy_(values)


def quantize_matrix(
    x: torch.Tensor,
    request: Request,
    amax: torch.Tensor | float | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    group_rows: int | None = None,
    swizzled: bool = False,
) -> Parts[torch.Tensor]:
    """Quantize a (rows, K) matrix on its device.

    amax: what to use in place of the operand's own: float32 tensors of one for each group, or a number for all.
    group_rows: rows that share a tensor-level scale (None: as the request's scaling says). swizzled: scales in tiles of
    128x4.
    """
    import torch

    kernel = choose(request)
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot do this: {kernel}")
    check_device(x)
    rows, width = x.shape
    block, per_byte = request.format.block, request.format.codes_per_byte
    with on_device(x):
        if request.contract.transform.hadamard:
            x = rotated(x, request.contract.transform.random_signs)
        operand = readable(x, request.tile[0], block)
        codes, scales = outputs(operand, request, swizzled, out if operand.shape == x.shape else None)
        group = group_rows or (1 if request.scaling == "row" else operand.shape[0])
        whose, given = given_amax(kernel, amax, operand, operand.shape[0] // group)
        matrix = Matrix(
            operand.shape[0],
            operand.shape[1],
            row_quads(operand),
            operand.is_contiguous(),
            None if operand.shape == x.shape else x.numel(),
        )
        made = quantization_for(kernel, request, matrix, group, swizzled, whose, x.device)
        small = torch.empty(made.program.small_floats, dtype=torch.float32, device=x.device)
        tables = torch.empty(made.program.table_bytes, dtype=torch.uint8, device=x.device)
        run(made.program, x.device, {
            Slot.X: operand, Slot.CODES: codes, Slot.SCALES: scales, Slot.SMALL: small, Slot.GIVEN: given,
            Slot.TABLES: tables,
        })  # fmt: skip
    stored, multiplier = tensor_numbers(kernel, made.small, small)
    if operand.shape != x.shape:
        codes = codes[:rows, : ceil_div(width, per_byte)].contiguous()
        if width % per_byte:
            codes[:, -1] &= 0xF
        if not swizzled:
            scales = scales[:rows, : ceil_div(width, block)].contiguous()
        if request.scaling == "row":
            stored = None if stored is None else stored[:rows]
            multiplier = None if multiplier is None else multiplier[:rows]
    return Parts(codes, scales, stored, multiplier)


def survey_matrix(
    x: torch.Tensor, request: Request, amax: float, trial: Trial, before: int = 0, scratch: torch.Tensor | None = None
) -> torch.Tensor:
    """The totals of a (rows, K) matrix for each candidate, but for a number that all have in common.

    amax: of all tensors that share the scale, whose totals are to be added. before: rows of the tensor before these.
    scratch: bytes, as many as the codes have.
    The result is int64: a row of words for each candidate, each of which stands for 32 bits (`total_of`).
    """
    import torch

    kernel = choose(request)
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot do this: {kernel}")
    check_device(x)
    with on_device(x):
        if request.contract.transform.hadamard:
            x = rotated(x, request.contract.transform.random_signs)
        operand = readable(x, request.tile[0], request.format.block)
        matrix = Matrix(operand.shape[0], operand.shape[1], row_quads(operand), operand.is_contiguous())
        made = survey_for(kernel, request, matrix, trial, x.device)
        small = torch.empty(made.program.small_floats, dtype=torch.float32, device=x.device)
        needed = operand.numel() // request.format.codes_per_byte
        if scratch is None or scratch.numel() < needed:
            scratch = torch.empty(needed, dtype=torch.uint8, device=x.device)
        run(made.program, x.device, {
            Slot.X: operand, Slot.CODES: scratch, Slot.SMALL: small, Slot.GIVEN: float32_bits(amax),
            Slot.SCALES: Sample(0, trial.step).behind(before * (operand.shape[1] // request.format.block)).first,
        })  # fmt: skip
    if made.small is None:
        raise TypeError("a survey has totals")
    first, count = made.small.totals // 2, made.small.candidates
    return small.view(torch.int64)[first : first + count * WORDS].view(count, WORDS)[count - len(trial.candidates) :]


def total_of(words: Sequence[int]) -> int:
    """The number that the words of a total stand for."""
    return sum(int(word) << 32 * index for index, word in enumerate(words))


def given_amax(
    kernel: ChosenKernel, amax: torch.Tensor | float | None, x: torch.Tensor, groups: int
) -> tuple[str, torch.Tensor | int]:
    """Whose amax counts, and what the program gets for it. A rule that looks at no amax gets 0."""
    import torch

    if amax is None:
        return (OWN, 0) if kernel.reads_amax else (VALUE, 0)
    if not isinstance(amax, torch.Tensor):
        return VALUE, float32_bits(amax)
    given = amax.to(device=x.device, dtype=torch.float32).reshape(-1)
    if given.numel() < groups:  # rows that only pad a tile have a scale of their own under row scaling
        given = torch.cat([given, given.new_zeros(groups - given.numel())])
    return TENSOR, given.contiguous()


def float32_bits(number: float) -> int:
    """The bits of a number rounded to float32."""
    return int.from_bytes(struct.pack("<f", number), "little")


def tensor_numbers(
    kernel: ChosenKernel, places: Small | None, small: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Stored scales and multipliers, as the program has written them."""
    if places is None or isinstance(kernel.rule, MXRule):
        return None, None
    multiplier = small[places.multiplier : places.multiplier + places.groups]
    if kernel.rule.stored is None:
        return None, multiplier
    return small[places.stored : places.stored + places.groups], multiplier


def _reason(chosen: object) -> Reason | None:
    return chosen if isinstance(chosen, Reason) else None


def _device_reason(device: str) -> Reason | None:
    if device == "numpy":
        return Reason("it takes torch tensors on a CUDA device, not numpy arrays")
    if device != "cuda" and not (device == "cpu" and interpreting()):
        return Reason(f"it takes tensors on a CUDA device, not on {device!r}; move the tensor with .cuda()")
    if importlib.util.find_spec("triton") is None:
        return Reason("Triton is not installed; install halfbyte[gpu]")
    return None
