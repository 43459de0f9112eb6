"""Programs bound to a device: what a whole call on ordinary memory launches, found by its shape."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.choose import choose, choose_decoder
from halfbyte.backends.gpu.constants import WORDS
from halfbyte.backends.gpu.cuda.table_kernels import setting
from halfbyte.backends.gpu.dispatch import OWN, VALUE
from halfbyte.backends.gpu.driver.commands import Program
from halfbyte.backends.gpu.driver.cuda import launcher
from halfbyte.backends.gpu.driver.run import bind, check_launch, stream_of
from halfbyte.backends.gpu.launch import Matrix
from halfbyte.backends.gpu.operand import check_device
from halfbyte.backends.gpu.programs import decoding_for, quantization_for, survey_for
from halfbyte.backends.gpu.small import Small
from halfbyte.backends.headroom import Trial
from halfbyte.backends.protocol import Reason
from halfbyte.contracts import MXRule
from halfbyte.errors import BackendError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

MOST = 1024
"""Shapes that are kept."""


class Bound:
    """A program on a device: one function call launches it on the device's current stream."""

    def __init__(self, program: Program, index: int, small: Small | None, is_stored: bool) -> None:
        self.program, self.index = program, index
        self.small_floats, self.table_bytes = program.small_floats, program.table_bytes
        self.stored = small.stored if small is not None and is_stored else -1
        """Where in slot SMALL the stored scale is; -1: nowhere."""
        self.multiplier = small.multiplier if small is not None else -1
        self._words, self._launch, self._stream = bind(program, index), launcher(), stream_of()
        self._address = ctypes.addressof(self._words)

    def launch(self, x: int, codes: int, scales: int, small: int, given: int, tables: int) -> None:
        """Put the launches on the current stream; the numbers are those of the slots."""
        status = self._launch(self._address, self._stream(self.index), x, codes, scales, small, given, tables)
        if status:
            check_launch(status, self.program)


class QuantizingCalls:
    """The programs that quantize contiguous, aligned tensors of whole blocks, by shape."""

    def __init__(self, request: Request, device: torch.device) -> None:
        import torch

        kernel = choose(request)
        if isinstance(kernel, Reason):
            raise BackendError(f"backend gpu cannot do this: {kernel}")
        check_device(torch.empty(0, device=device))
        self.request, self.device, self.kernel = request, device, kernel
        self.tensor_type = torch.Tensor
        transform = request.contract.transform
        self.usual = request.tile[0] == 1 and not (transform.hadamard or transform.columnwise)
        """Whether operands are taken as they are."""
        self._is_stored = not isinstance(kernel.rule, MXRule) and kernel.rule.stored is not None
        self._found: dict[tuple[int, int, str], Bound] = {}
        self._setting = setting()

    def bound(self, rows: int, width: int, whose: str) -> Bound:
        """The program for a (rows, width) matrix. `whose`: the amax, as in dispatch.py."""
        if self.kernel.table is not None and setting() != self._setting:
            self._found, self._setting = {}, setting()
        found = self._found.get((rows, width, whose))
        return self._make(rows, width, whose) if found is None else found

    def survey(self, rows: int, width: int, trial: Trial) -> BoundSurvey:
        """What each candidate for the headroom of a given amax costs. (survey_matrix in backend.py) Not kept here."""
        made = survey_for(self.kernel, self.request, self._matrix(rows, width), trial, self.device)
        if made.small is None:
            raise TypeError("a survey has totals")
        bound = Bound(made.program, self.device.index or 0, made.small, False)
        behind = made.small.candidates - len(trial.candidates)
        return BoundSurvey(bound, 4 * made.small.totals + 8 * WORDS * behind, 8 * WORDS * len(trial.candidates))

    def _matrix(self, rows: int, width: int) -> Matrix:
        return Matrix(rows, width, width * (4 if self.request.dtype == "fp32" else 2) // 16, True)

    def _make(self, rows: int, width: int, whose: str) -> Bound:
        request = self.request
        matrix = self._matrix(rows, width)
        group_rows = 1 if request.scaling == "row" else rows
        asked = VALUE if whose == OWN and not self.kernel.reads_amax else whose
        made = quantization_for(self.kernel, request, matrix, group_rows, False, asked, self.device)
        bound = Bound(made.program, self.device.index or 0, made.small, self._is_stored)
        if len(self._found) >= MOST:
            self._found.clear()
        self._found[rows, width, whose] = bound
        return bound


class BoundSurvey:
    """The survey of a shape on a device. Its totals are in slot SMALL."""

    def __init__(self, bound: Bound, first: int, words: int) -> None:
        self.bound = bound
        self.first, self.size = first, words
        """Bytes: where in slot SMALL the totals of the candidates lie, one after the other, and how many they are."""

    def launch(self, x: int, scratch: int, small: int, amax: int, first: int) -> None:
        """scratch: as many bytes as the codes have. amax: its bits. first: the first block of a sample."""
        self.bound.launch(x, scratch, first, small, amax, 0)


class DecodingCalls:
    """The programs that decode contiguous, aligned tensors of whole blocks, by shape."""

    def __init__(self, request: Request, dtype: str, device: torch.device) -> None:
        import torch

        decoder = choose_decoder(request)
        if isinstance(decoder, Reason):
            raise BackendError(f"backend gpu cannot do this: {decoder}")
        check_device(torch.empty(0, device=device))
        self.request, self.dtype, self.device, self.decoder = request, dtype, device, decoder
        self.tensor_type, self.reads_stored = torch.Tensor, decoder.decode is not None
        self._found: dict[tuple[int, int, int], Bound] = {}

    def bound(self, rows: int, width: int, stored: int) -> Bound:
        """The program for a (rows, width) matrix with so many stored scales."""
        found = self._found.get((rows, width, stored))
        if found is None:
            program = decoding_for(self.decoder, self.request, rows, width, stored, self.dtype, self.device)
            found = Bound(program, self.device.index or 0, None, False)
            if len(self._found) >= MOST:
                self._found.clear()
            self._found[rows, width, stored] = found
        return found
