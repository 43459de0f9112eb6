"""One call of the kernels: the operand, the results, and the numbers of the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import over_ranges
from halfbyte.backends.numbering import DTYPE_NUMBERS
from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale
from halfbyte.contracts.spec import TensorScale
from halfbyte.request import Request

Listed = npt.NDArray[np.int64]
"""Indices of blocks that no table describes."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A contiguous matrix of whole blocks and tiles, and the arrays to fill."""

    x: npt.NDArray[Any]
    request: Request
    codes: U8
    scales: U8
    amax: F32 | None = None
    """The tensor-level amaxes that blocks are quantized with; None for MX formats."""

    @property
    def block(self) -> int:
        return self.request.format.block

    @property
    def dtype(self) -> int:
        """The number of the operand's dtype in the kernels."""
        return DTYPE_NUMBERS[self.request.dtype]

    @property
    def columns(self) -> int:
        """Blocks per row."""
        return int(self.scales.shape[1])

    @property
    def block_bytes(self) -> int:
        return self.block * self.x.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        return int(self.x.shape[1]) * self.x.dtype.itemsize

    @property
    def code_bytes(self) -> int:
        """Bytes of codes per block."""
        return self.block // self.request.format.codes_per_byte

    def over_blocks(self, run: Callable[[int, int], Any]) -> list[Any]:
        """Call run(first block, last block + 1) on threads, with ranges that cover the matrix."""
        return over_ranges(run, self.scales.size, self.block_bytes, self.request.threads)

    def over_rows(self, run: Callable[[int, int], Any], rows: int = 1) -> list[Any]:
        """Like `over_blocks`, but over rows, or over groups of `rows` rows."""
        return over_ranges(run, self.x.shape[0] // rows, rows * self.row_bytes, self.request.threads)

    def patch_blocks(self, listed: Listed) -> None:
        """Quantize the listed blocks with the reference."""
        if listed.size == 0:
            return
        parts = quantize_matrix(self.x.reshape(-1, self.block)[listed], self.request, self.amax)
        self.codes.reshape(-1, parts.codes.shape[1])[listed] = parts.codes
        self.scales.reshape(-1)[listed] = parts.scales[:, 0]

    def patch_rows(self, listed: Listed) -> None:
        """Quantize all rows that have listed blocks with the reference.

        Weights and Hessians belong to columns, so the reference needs whole rows.
        """
        if listed.size == 0:
            return
        touched = np.unique(listed // self.columns)
        parts = quantize_matrix(self.x[touched], self.request, self.amax)
        self.codes[touched], self.scales[touched] = parts.codes, parts.scales


@dataclass(frozen=True, kw_only=True)
class NVFP4Call(Call):
    """A call with the rule and the tensor-level numbers of NVFP4."""

    rule: NVFP4Rule
    t: TensorScale
    multiplier: F32
    """The multiplier of code × scale: one for the tensor, or one per row."""
    largest: float | F32 | None = None
    """The largest magnitude of the matrix itself, or of each row, if it is known already."""

    @property
    def by_row(self) -> bool:
        return self.request.scaling == "row"

    @property
    def one_scale(self) -> TensorScale:
        """The tensor-level numbers as scalars, for a call with one tensor scale."""
        t = self.t
        return TensorScale(t.amax.reshape(()), t.factor.reshape(()), t.largest, t.top, t.statistics)


@np.errstate(all="ignore")
def nvfp4_call(
    x: npt.NDArray[Any],
    rule: NVFP4Rule,
    request: Request,
    amaxes: tuple[F32, float | F32 | None],
    outputs: tuple[U8, ...],
) -> tuple[NVFP4Call, F32 | None]:
    """A call, and the stored scales. amaxes: those to quantize with, and the operand's own if they are known."""
    amax, largest = amaxes
    t = tensor_scale(amax.reshape(-1, 1, 1), rule, request.method, request.dtype)
    stored, multiplier = stored_scale(rule, t)
    call = NVFP4Call(
        x=x, request=request, codes=outputs[0], scales=outputs[1], amax=amax, rule=rule, t=t, multiplier=multiplier,
        largest=largest,
    )  # fmt: skip
    return call, stored


@dataclass(frozen=True, kw_only=True)
class MXCall(Call):
    """A call with the rule of an MX format."""

    rule: MXRule
