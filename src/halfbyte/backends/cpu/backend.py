"""The compiled CPU backend. It gives the bits of the reference, because its tables come from the contract's formulas.

Some blocks are described by no table (NaN, Inf, special cases of a contract). The kernel lists them, and the reference
quantizes them. The reference also quantizes whole tensors whose numbers are outside the range in which a kernel's
shortcuts are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu import exact, four_six, headroom, mx, peer_searches, plain
from halfbyte.backends.cpu.call import MXCall, NVFP4Call, nvfp4_call
from halfbyte.backends.cpu.choose import Kernel, choose, choose_decoder
from halfbyte.backends.cpu.decode import decode_blocks, decode_table
from halfbyte.backends.cpu.hadamard import rotate_matrix
from halfbyte.backends.cpu.row_decode import decode_rows
from halfbyte.backends.cpu.rows import quantize_rows
from halfbyte.backends.cpu.whole import WholeCall, WholeDecode, whole_call, whole_decode
from halfbyte.backends.cpu.zeros import quantize_zeros
from halfbyte.backends.headroom import chooser
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.request import Request

NVFP4_KERNELS: dict[Kernel, Callable[[NVFP4Call], bool]] = {
    Kernel.PLAIN_BLOCKS: plain.blocks,
    Kernel.PLAIN_TILES: plain.tiles,
    Kernel.PLAIN_ROWS: plain.rows,
    Kernel.FOUR_SIX_BLOCKS: four_six.blocks,
    Kernel.FOUR_SIX_TILES: four_six.tiles,
    Kernel.FOUR_SIX_ROWS: four_six.rows,
    Kernel.FOUR_SIX_ORDERED: four_six.ordered,
    Kernel.EXACT_BLOCKS: exact.blocks,
    Kernel.EXACT_ROWS: exact.rows,
    Kernel.EXACT_GENERAL: exact.general,
    Kernel.STATIC_SEARCH: peer_searches.static,
    Kernel.QWANTIZE_SEARCH: peer_searches.nvfp4_by_qwantize,
}
"""Each function fills codes and scales, or returns False if the tensor's numbers are outside its range."""

MX_KERNELS: dict[Kernel, Callable[[MXCall], None]] = {
    Kernel.MX_BLOCKS: mx.blocks,
    Kernel.MX_EXACT: mx.exact,
    Kernel.MX_HESSIAN: mx.through_hessians,
    Kernel.MX_QWANTIZE_SEARCH: mx.by_qwantize,
}


class Cpu:
    """The C++ kernels."""

    name = "cpu"
    takes_tensors = False

    def supports(self, request: Request) -> str | None:
        found = choose(request)
        return found if isinstance(found, Reason) else None

    def supports_decoding(self, request: Request) -> str | None:
        return choose_decoder(request)

    def whole_call(self, request: Request) -> WholeCall | None:
        """One function of the library for the whole of a small call; None if the request has none."""
        return whole_call(request)

    def whole_decode(self, request: Request, dtype: np.dtype[np.generic]) -> WholeDecode | None:
        """The same for decoding to a dtype."""
        return whole_decode(request, dtype)

    def quantize(
        self, x: npt.NDArray[Any], request: Request, amax: F32 | None = None, out: tuple[U8, U8] | None = None
    ) -> Parts[npt.NDArray[Any]]:
        """Quantize a (rows, K) matrix. Strided or unaligned input is copied first."""
        kernel, rule = choose(request), request.rule
        if isinstance(kernel, Reason):
            raise TypeError(f"{kernel}: `supports` was not asked")
        if request.contract.transform.hadamard:
            x = rotate_matrix(x, request.dtype, request.contract.transform.random_signs, request.threads)
        matrix = _whole(x, request)
        codes, scales = _outputs(matrix, request, out)
        if isinstance(rule, MXRule):
            MX_KERNELS[kernel](MXCall(x=matrix, request=request, codes=codes, scales=scales, rule=rule))
            parts: Parts[npt.NDArray[Any]] = Parts(codes, scales, None, None)
        elif isinstance(rule, NVFP4Rule):
            quantize = quantize_rows if request.scaling == "row" else _quantize_nvfp4
            parts = quantize(matrix, rule, request, (amax, x.size), (codes, scales), NVFP4_KERNELS[kernel])
        else:
            raise TypeError(f"{request.contract} has no quantizer")
        return parts if matrix.shape == x.shape else _crop(parts, x.shape, request)

    def dequantize(
        self,
        parts: Parts[npt.NDArray[Any]],
        shape: tuple[int, int],
        request: Request,
        dtype: Any,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Decode a (rows, K) matrix with a table of the contract's values, which are already in the output dtype."""
        stored, width = parts.stored_scale, shape[1]
        codes, scales = np.ascontiguousarray(parts.codes), np.ascontiguousarray(parts.scales)
        if width % request.format.block:  # the codes of the last block, made whole
            whole = scales.shape[1] * request.format.block
            codes = np.pad(codes, ((0, 0), (0, whole // request.format.codes_per_byte - codes.shape[1])))
            values = self.dequantize(Parts(codes, scales, stored, None), (shape[0], whole), request, dtype)
            return np.ascontiguousarray(values[:, :width])
        if stored is not None and stored.size > 1:
            return decode_rows(Parts(codes, scales, stored, None), shape, request, dtype, out)
        rule = request.rule
        top = rule.anchor(request.method) if isinstance(rule, NVFP4Rule) else np.float32(1)
        one = None if stored is None else stored.reshape(())
        table = decode_table(request.contract, request.format, one, top, dtype)
        return decode_blocks(codes, scales, table, shape, request, out)


def _quantize_nvfp4(
    x: npt.NDArray[Any],
    rule: NVFP4Rule,
    request: Request,
    own: tuple[F32 | None, int],
    outputs: tuple[U8, U8],
    kernel: Callable[[NVFP4Call], bool],
) -> Parts[npt.NDArray[Any]]:
    """Compute the tensor-level numbers and run the kernel, or the reference if the numbers are outside its range.

    own: the given amax, if any, and the number of elements without padding.
    """
    largest: float | None = None  # the tensor's own largest magnitude, if the amax pass found it
    amax, size = own
    if amax is None:
        amax = plain.tensor_amax(x, request.dtype, False, request.threads)
        largest = float(amax[0])
        amax = headroom.raised_amax(x, amax, chooser(request), size)
    call, stored = nvfp4_call(x, rule, request, (amax, largest), outputs)
    if largest == 0:
        quantize_zeros(x, request, *outputs)
    elif not kernel(call):
        return quantize_matrix(x, request, amax)
    return Parts(*outputs, stored, call.multiplier)


def _whole(x: npt.NDArray[Any], request: Request) -> npt.NDArray[Any]:
    """The matrix, made contiguous and padded with zeros to whole blocks and tiles."""
    rows, width = x.shape
    below, right = -rows % request.tile[0], -width % request.format.block
    padded = np.pad(x, ((0, below), (0, right))) if below or right else x
    return np.require(padded, requirements=["C", "A"])


def _outputs(x: npt.NDArray[Any], request: Request, out: tuple[U8, U8] | None) -> tuple[U8, U8]:
    """The arrays to write into: the given ones if they fit the (possibly padded) operand, else new ones."""
    code_shape = (x.shape[0], x.shape[1] // request.format.codes_per_byte)
    scale_shape = (x.shape[0], x.shape[1] // request.format.block)
    if out is not None and (out[0].shape, out[1].shape) == (code_shape, scale_shape):
        return out
    return np.empty(code_shape, np.uint8), np.empty(scale_shape, np.uint8)


def _crop(parts: Parts[npt.NDArray[Any]], shape: tuple[int, ...], request: Request) -> Parts[npt.NDArray[Any]]:
    """Parts of a padded matrix, cropped to the shape of the operand. An odd row ends in a zero nibble."""
    rows, width = shape
    codes = np.ascontiguousarray(parts.codes[:rows, : ceil_div(width, request.format.codes_per_byte)])
    if width % request.format.codes_per_byte:
        codes[:, -1] &= 0xF
    scales = np.ascontiguousarray(parts.scales[:rows, : ceil_div(width, request.format.block)])
    per_row = request.scaling == "row"
    stored = parts.stored_scale[:rows] if per_row and parts.stored_scale is not None else parts.stored_scale
    multiplier = parts.global_scale[:rows] if per_row and parts.global_scale is not None else parts.global_scale
    return Parts(codes, scales, stored, multiplier)
