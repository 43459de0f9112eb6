"""Programs that were made before: one for each kernel, shape and device. A call looks its program up.

Programs of methods that hold arrays refer to copies of these on the device. They go when the method goes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from halfbyte.backends.gpu.choose import ChosenKernel, Decoder
from halfbyte.backends.gpu.constants import DECODE_BY_TABLE, FLAT, ONE_GROUP, Constants
from halfbyte.backends.gpu.cuda.table_kernels import setting
from halfbyte.backends.gpu.dispatch import Quantization, quantization
from halfbyte.backends.gpu.driver.commands import Address, Command, Program, Slot, fixed
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.launch import CODES, SCALES, Launch, Matrix, X, group_kind, source_of, weighs_columns
from halfbyte.backends.gpu.mx_tables import decode_table_on
from halfbyte.backends.gpu.operand import LANES, assembly
from halfbyte.backends.gpu.survey import Survey
from halfbyte.backends.headroom import Trial
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.codec.blocks import ceil_div
from halfbyte.methods import Method
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

MOST = 1024
"""Programs that are kept; with one more, all are forgotten and made again as they are needed."""

STORED = Address(Slot.GIVEN)
"""Decoding: the stored scales."""

T = TypeVar("T")
_PROGRAMS: dict[Any, Any] = {}
_PROGRAMS_OF_METHODS: weakref.WeakKeyDictionary[Method, dict[Any, Any]] = weakref.WeakKeyDictionary()


def _kept(cache: dict[Any, Any], key: object, make: Callable[[], T]) -> T:
    found: T | None = cache.get(key)
    if found is None:
        found = make()
        if len(cache) >= MOST:
            cache.clear()
        cache[key] = found
    return found


def quantization_for(
    kernel: ChosenKernel, request: Request, x: Matrix, group_rows: int, swizzled: bool, whose: str, device: torch.device
) -> Quantization:
    """The commands that quantize a matrix of this shape on this device."""
    method = request.method
    cache = _PROGRAMS_OF_METHODS.setdefault(method, {}) if weighs_columns(method) else _PROGRAMS
    held = None if weighs_columns(method) else method
    key = (kernel, held, request.tile, x, group_rows, swizzled, whose, device, kernel.table and setting())
    return _kept(cache, key, lambda: quantization(kernel, request, x, group_rows, swizzled, whose, device))


def survey_for(kernel: ChosenKernel, request: Request, x: Matrix, trial: Trial, device: torch.device) -> Quantization:
    """The commands that find the totals of a matrix under each candidate for the headroom of a given amax.

    Of a sample, the number of the first block is in slot SCALES.
    """
    method = request.method
    cache = _PROGRAMS_OF_METHODS.setdefault(method, {}) if weighs_columns(method) else _PROGRAMS

    def make() -> Quantization:
        survey = Survey(Launch(kernel, request, source_of(x, request, x.rows, False), device), trial.candidates)
        commands = survey.totals_of(Address(Slot.GIVEN), trial.step)
        return Quantization(Program(tuple(commands), survey.small.floats), survey.small)

    return _kept(cache, ("survey", kernel, x, trial, device), make)


def decoding_for(
    decoder: Decoder, request: Request, rows: int, width: int, stored: int, dtype: str, device: torch.device
) -> Program:
    """The commands that decode (rows, width) values, `width` in whole blocks, with so many stored scales (or 0)."""
    key = (decoder, request.format, request.contract, rows, width, stored, dtype, device)

    def make() -> Program:
        block = request.format.block
        columns = width // block
        blocks = rows * columns
        table, group, group_blocks, decode = CODES, ONE_GROUP, blocks, decoder.decode
        if decode is None:
            table, decode = fixed(decode_table_on(request.contract, request.format, str(device))), DECODE_BY_TABLE
        elif stored:
            group_blocks = blocks // stored
            group = group_kind(stored, group_blocks, LANES)
        constants: Constants = {
            "B": LANES, "N": block, "DTYPE": DTYPE_NUMBERS[dtype], "MAP": FLAT, "GROUP": group, "DECODE": decode,
            "TOP": decoder.top, "WIDE": decoder.wide, "NEGATIVE_ZERO": decoder.negative_zero, "ASM": assembly(device),
        }  # fmt: skip
        out_quads = width * (4 if dtype == "fp32" else 2) // 16
        arguments = (CODES, SCALES, STORED if stored else CODES, table, X, blocks, columns, out_quads, group_blocks)
        kernel = triton_kernel("decode.dequantize", constants, LANES // 32)
        return Program((Command(kernel, (ceil_div(blocks, LANES), 1), arguments),))

    try:
        return _kept(_PROGRAMS, key, make)
    except TypeError:  # a contract made by hand may hold options that cannot be hashed
        return make()
