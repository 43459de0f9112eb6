"""The compiled CPU backend: checks, tables, ranges. The bits are the reference's, by tables made from its formulas.

Blocks that no table describes (NaN, Inf, a contract's odd corners) are listed by the kernel and quantized by the
reference; so are whole tensors whose numbers leave the range in which a kernel's shortcut is exact.
"""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import DTYPE_CODES, load_library, native, over_ranges, pointer
from halfbyte.backends.cpu.mx import mx_reason, quantize_mx, run_tables
from halfbyte.backends.cpu.nvfp4 import choose_bytes, search_reason
from halfbyte.backends.cpu.tables import build_nvfp4_tables, decode_table, magnitude_values, one_scale
from halfbyte.backends.protocol import Parts, Request
from halfbyte.backends.reference.quantize import Reference, tensor_scale
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.formats import E2M1
from halfbyte.methods import Amax

REFERENCE = Reference()


class Cpu:
    """The C++ kernels."""

    name = "cpu"

    def supports(self, request: Request) -> str | None:
        if load_library() is None:
            return "the compiled kernels are not installed"
        rule = request.contract.rules.get(request.format.name)
        if isinstance(rule, MXRule):
            return mx_reason(request, rule)
        if isinstance(rule, NVFP4Rule):
            return search_reason(request, rule.for_method(request.method))
        return None

    def supports_decoding(self, request: Request) -> str | None:
        return None if load_library() is not None else "the compiled kernels are not installed"

    def quantize(self, x: npt.NDArray[np.generic], request: Request) -> Parts:
        """Quantize a (rows, K) matrix; strided or unaligned input is copied first."""
        rows, width = x.shape
        block = request.format.block
        padding = ((0, -rows % request.tile[0]), (0, -width % block))
        whole = not (padding[0][1] or padding[1][1])
        matrix = np.require(x, requirements=["C", "A"]) if whole else np.pad(x, padding)
        rule = request.contract.rule(request.format)
        if isinstance(rule, MXRule):
            codes, scales = _outputs(matrix, request)
            quantize_mx(matrix, rule, request, codes, scales)
            parts = Parts(codes, scales, None, None)
        elif isinstance(rule, NVFP4Rule):
            parts = _quantize_nvfp4(matrix, rule.for_method(request.method), request)
        else:
            raise TypeError(f"{request.contract} has no quantizer")
        return parts if matrix.shape == x.shape else _crop(parts, x.shape, request)

    def dequantize(
        self,
        codes: U8,
        scales: U8,
        stored_scale: F32 | None,
        shape: tuple[int, int],
        request: Request,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Decode a (rows, K) matrix by a table of the contract's own values, straight to the output dtype."""
        if (stored_scale is not None and stored_scale.size > 1) or shape[1] % request.format.block:
            return REFERENCE.dequantize(codes, scales, stored_scale, shape, request, dtype)
        rule = request.contract.rule(request.format)
        top = rule.for_method(request.method).anchor(request.method) if isinstance(rule, NVFP4Rule) else np.float32(1)
        stored = None if stored_scale is None else stored_scale.reshape(())
        table = decode_table(request.contract, request.format, stored, top, dtype)
        return _decode(np.ascontiguousarray(codes), np.ascontiguousarray(scales), table, shape, request, out)


def tensor_amax(x: npt.NDArray[Any], request: Request) -> F32:
    """Largest magnitude of a contiguous matrix, or of each row, as float32 of shape (1,) or (rows,). NaN wins."""
    library, isa = native()
    dtype, size, width = DTYPE_CODES[request.dtype], x.dtype.itemsize, x.shape[1]
    if request.scaling == "row":
        bits = np.empty(x.shape[0], np.uint32)

        def rows(start: int, stop: int) -> None:
            library.hb_amax_rows(
                isa, pointer(x, start * width * size), ctypes.c_int64(stop - start), ctypes.c_int64(width), dtype,
                pointer(bits, start * 4),
            )  # fmt: skip

        over_ranges(rows, x.shape[0], width * size, request.threads)
    else:

        def part(start: int, stop: int) -> int:
            return int(library.hb_amax(isa, pointer(x, start * size), ctypes.c_int64(stop - start), dtype))

        bits = np.array([max(over_ranges(part, x.size, size, request.threads))], np.uint32)
    return magnitude_values(bits.astype(np.int64), request.dtype)


def _quantize_nvfp4(x: npt.NDArray[Any], rule: NVFP4Rule, request: Request) -> Parts:
    largest: float | None = None  # of the tensor itself, where the amax pass has found it
    amax = request.global_amax
    if amax is None:
        amax = tensor_amax(x, request)
        largest = float(amax.max())  # NaN wins
    request = dataclasses.replace(request, global_amax=amax)
    with np.errstate(all="ignore"):
        t = tensor_scale(np.zeros((1, 1, 1), np.float32), rule, request)
        stored = None if rule.stored is None else rule.stored(t).reshape(-1)
        multiplier = np.ones(1, np.float32) if stored is None else rule.multiplier(stored, t.top)
    codes, scales = _outputs(x, request)
    if request.scaling == "row" or request.tile[0] != 1 or not isinstance(request.method, Amax):
        done = choose_bytes(x, rule, t, multiplier, request, codes, scales, largest)
        if not done:
            return REFERENCE.quantize(x, request)
    else:
        tables = build_nvfp4_tables(rule, one_scale(t), request.dtype)
        if tables is None:
            return REFERENCE.quantize(x, request)
        run_tables(x, tables, request, codes, scales)
    return Parts(codes, scales, stored, multiplier)


def _outputs(x: npt.NDArray[Any], request: Request) -> tuple[U8, U8]:
    """The arrays to write into: those given, if they fit the (perhaps padded) operand, or new ones."""
    code_shape = (x.shape[0], x.shape[1] // request.format.codes_per_byte)
    scale_shape = (x.shape[0], x.shape[1] // request.format.block)
    if request.out is not None and (request.out[0].shape, request.out[1].shape) == (code_shape, scale_shape):
        return request.out
    return np.empty(code_shape, np.uint8), np.empty(scale_shape, np.uint8)


def _decode(
    codes: U8,
    scales: U8,
    table: npt.NDArray[Any],
    shape: tuple[int, int],
    request: Request,
    out: npt.NDArray[Any] | None,
) -> npt.NDArray[Any]:
    library, isa = native()
    block, width = request.format.block, table.dtype.itemsize
    code_bytes = block // request.format.codes_per_byte
    out = np.empty(shape, table.dtype) if out is None else out
    if request.format.element == E2M1 and width == 2:  # sixteen low bytes, then sixteen high bytes
        table = np.ascontiguousarray(table.view(np.uint8).reshape(256, 16, 2).swapaxes(1, 2))

    def run(start: int, stop: int) -> None:
        inputs = pointer(codes, start * code_bytes), pointer(scales, start), ctypes.c_int64(stop - start)
        at = pointer(out, start * block * width)
        if request.format.element == E2M1:
            library.hb_decode(isa, *inputs, block, pointer(table), width, at)
        else:
            library.hb_decode_mxfp8(isa, *inputs, pointer(table), width, at)

    over_ranges(run, scales.size, block * width, request.threads)
    return out


def _crop(parts: Parts, shape: tuple[int, ...], request: Request) -> Parts:
    """Parts of a padded matrix, cropped to the operand's own shape; an odd row ends in a zero nibble."""
    rows, width = shape
    codes = np.ascontiguousarray(parts.codes[:rows, : ceil_div(width, request.format.codes_per_byte)])
    if width % request.format.codes_per_byte:
        codes[:, -1] &= 0xF
    scales = np.ascontiguousarray(parts.scales[:rows, : ceil_div(width, request.format.block)])
    per_row = request.scaling == "row"
    stored = parts.stored_scale[:rows] if per_row and parts.stored_scale is not None else parts.stored_scale
    multiplier = parts.global_scale[:rows] if per_row and parts.global_scale is not None else parts.global_scale
    return Parts(codes, scales, stored, multiplier)
