"""The exact searches that have no kernel of their own, on one that takes any element, block, row scale and objective.

native/general.inc evaluates the objective of reference/search.py itself; which scales it need not try is proved there.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.library import DTYPE_CODES, GeneralSearch, Grid, as_array, native, over_ranges, pointer
from halfbyte.backends.cpu.tables import element_constants, exponent_of_largest, first_byte, hessian_bounds, triangle
from halfbyte.backends.protocol import Request
from halfbyte.backends.reference.quantize import scale_byte
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts import MXRule, NVFP4Rule
from halfbyte.contracts.spec import TensorScale
from halfbyte.formats import E2M1, E4M3, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Hessian, Optimal

ELEMENTS = ["even", "down", "wraps", "e4m3", "first nearest"]
"""Ways to an element in the order of native/searches.h: E2M1 with ties to even, down, unsaturated; E4M3; gguf's own."""

Listed = npt.NDArray[np.int64]


class Search:
    """The kernel's request, and the arrays that its pointers lie in."""

    def __init__(self, request: Request, width: int) -> None:
        block, method = request.format.block, request.method
        self.native = GeneralSearch(block=block, dtype=DTYPE_CODES[request.dtype])
        self.kept: list[npt.NDArray[Any]] = []
        if isinstance(method, Hessian):
            self.native.objective = 2
            numbers, bounds = prepared(method)
            self.set("numbers", numbers)
            self.set("bounds", bounds)
        elif isinstance(method, Optimal) and method.channel_weights is not None:
            self.native.objective = 1
            self.set("numbers", scaled_weights(method.channel_weights, width))

    def set(self, name: str, array: npt.NDArray[Any]) -> None:
        """Let a field point to an array of float32."""
        kept = np.ascontiguousarray(array, np.float32)
        self.kept.append(kept)
        setattr(self.native, name, kept.ctypes.data)

    def bytes_of(self, x: npt.NDArray[Any], request: Request, scales: U8) -> Listed:
        """Fill the scale bytes of a contiguous matrix; the numbers of the blocks that were left out."""
        library, isa = native()
        rows, columns = scales.shape
        row_bytes = x.shape[1] * x.dtype.itemsize
        irregular = np.empty(scales.size, np.int64)

        def run(start: int, stop: int) -> Listed:
            at = start * columns
            found = library.hb_general(
                isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
                ctypes.c_int64(start), ctypes.byref(self.native), pointer(scales, at), pointer(irregular, at * 8),
            )  # fmt: skip
            return np.asarray(irregular[at : at + int(found)] + at)

        return np.concatenate(over_ranges(run, rows, row_bytes, request.threads))

    def descend(self, x: npt.NDArray[Any], request: Request, codes: U8, scales: U8) -> None:
        """Move single codes while rᵀHr falls, if the method asks for it."""
        if not isinstance(request.method, Hessian) or request.method.codes != "descent":
            return
        library, isa = native()
        rows, columns = scales.shape
        row_bytes, grid = x.shape[1] * x.dtype.itemsize, grid_of(request.format.element)

        def run(start: int, stop: int) -> None:
            library.hb_general_descent(
                isa, pointer(x, start * row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
                ctypes.c_int64(start), ctypes.byref(self.native), ctypes.byref(grid), pointer(scales, start * columns),
                pointer(codes, start * codes.shape[1]),
            )  # fmt: skip

        over_ranges(run, rows, row_bytes, request.threads)


@np.errstate(all="ignore")
def nvfp4_search(rule: NVFP4Rule, t: TensorScale, multiplier: F32, request: Request, width: int) -> Search:
    """A contract's numbers for E4M3 scales, for one tensor or for each row."""
    search = Search(request, width)
    by_row = TensorScale(t.amax.reshape(-1, 1), t.factor.reshape(-1, 1), t.largest, t.top, t.statistics)
    divides, constants = element_constants(rule, by_row)
    g = multiplier.reshape(-1)
    exponent = (np.frexp(g)[1] - 1).astype(np.int32)
    constant = np.zeros((g.size, 256), np.float32)
    constant[:, :127] = constants
    own = search.native
    own.element = ELEMENTS.index("wraps" if rule.rounding.wraps else rule.rounding.tie)
    own.divides, own.per_row = int(divides), int(request.scaling == "row")
    own.first, own.last = first_byte(rule), E4M3.magnitudes.size - 1
    own.zero_byte = int(scale_byte(rule.pre_scale(np.zeros((1, 1), np.float32), by_row), rule.scale_byte)[0, 0])
    own.most_value, own.zero_below = E2M1.max, 0.25
    search.set("value", np.append(E4M3.magnitudes, np.zeros(129, np.float32)))
    search.set("constant", constant)
    search.set("prescale", np.ldexp(np.float32(1), -exponent))
    search.set("unit", np.ldexp(g, -exponent))
    return search


@np.errstate(all="ignore")
def mx_search(rule: MXRule, element_name: str, request: Request, width: int) -> Search:
    """Powers of two; k belongs to the block. Codes come from the tables of `cpu_mx.search_tables`."""
    search = Search(request, width)
    element = request.format.element
    statistics = request.dtype if rule.statistics == "input" else "fp32"
    zero, _ = rule.scale(np.zeros(1, np.float32), statistics, element)
    own = search.native
    own.element = ELEMENTS.index(element_name)
    own.first, own.last, own.by_block = 0, E8M0.magnitudes.size - 1, 1
    own.start = int(element.max_exponent)
    own.zero_byte = -1 if zero[0] == 255 else int(zero[0])
    own.most_value, own.zero_below = element.max, element.smallest / 2
    values = np.append(E8M0.magnitudes, np.float32(1)).astype(np.float32)
    search.set("value", values)
    search.set("constant", np.float32(1) / values)
    return search


@functools.cache
def grid_of(element: ElementFormat) -> Grid:
    """The finite values of an element format in ascending order, one zero, with their codes."""
    values = element.values
    finite = np.isfinite(values)
    steps = np.unique(values[finite] + np.float32(0))
    grid = Grid(size=steps.size, code_bits=element.bits)
    as_array(grid.value, np.float32)[: steps.size] = steps
    magnitudes = np.searchsorted(element.magnitudes, np.abs(steps))
    as_array(grid.code, np.uint8)[: steps.size] = magnitudes | np.where(steps < 0, element.sign_code, 0)
    codes = np.arange(values.size, dtype=np.uint8)
    places = np.searchsorted(steps, np.where(finite, decode(codes, element), 0) + np.float32(0))
    as_array(grid.place, np.uint8)[: values.size] = places
    return grid


_PREPARED: weakref.WeakKeyDictionary[Hessian, tuple[F32, F32]] = weakref.WeakKeyDictionary()


def prepared(method: Hessian) -> tuple[F32, F32]:
    """What the kernels need of a Hessian, kept as long as the method lives: tensors come in chunks, matrices do not."""
    if method not in _PREPARED:
        scaled = np.ldexp(method.matrices, -exponent_of_largest(np.abs(method.matrices))).astype(np.float32)
        _PREPARED[method] = triangle(scaled), hessian_bounds(scaled)
    return _PREPARED[method]


def scaled_weights(given: F32, width: int) -> F32:
    """Weights for every column of a padded matrix, the largest in [1, 2)."""
    weights = np.zeros(width, np.float32)
    weights[: given.size] = np.ldexp(given, -exponent_of_largest(given))
    return weights
