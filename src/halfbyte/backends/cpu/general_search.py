"""Exact searches without a specialised kernel: one general kernel takes any element, block, row scale and objective.

The kernel is in native/. It evaluates the objective of reference/search.py itself. Its comments prove which scales it
need not try.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu.call import Call, Listed, MXCall, NVFP4Call
from halfbyte.backends.cpu.library import native, pointer
from halfbyte.backends.cpu.structs import GeneralSearch, Grid, as_array
from halfbyte.backends.cpu.tables_mx import zero_block_byte
from halfbyte.backends.cpu.tables_nvfp4 import element_constants
from halfbyte.backends.derived import quadratics, scaled_weights
from halfbyte.codec.element import decode
from halfbyte.contracts.arithmetic import first_scale_byte, zero_scale_byte
from halfbyte.contracts.spec import TensorScale
from halfbyte.formats import E2M1, E4M3, E8M0
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Hessian, Optimal

ELEMENTS = ["even", "down", "wraps", "e4m3", "first nearest"]
"""Ways to round an element, in the order of native/searches.h: E2M1 (ties to even, down, wrapping), E4M3, gguf's."""


OBJECTIVES = ["squares", "weighted squares", "quadratic"]
"""What a search minimises, in the order of native/searches.h."""


class Search:
    """The structure that the kernel takes, and the arrays that its pointers point to."""

    def __init__(self, call: Call) -> None:
        method = call.request.method
        self.native = GeneralSearch(block=call.block, dtype=call.dtype)
        self.held: list[npt.NDArray[Any]] = []
        if isinstance(method, Hessian):
            self.native.objective = OBJECTIVES.index("quadratic")
            derived = quadratics(method)
            self.point("numbers", derived.triangles)
            self.point("bounds", derived.bounds)
        elif isinstance(method, Optimal) and (weights := scaled_weights(method, call.x.shape[1])) is not None:
            self.native.objective = OBJECTIVES.index("weighted squares")
            self.point("numbers", weights)

    def point(self, name: str, array: npt.NDArray[Any]) -> None:
        """Set a field to the address of a float32 array, and keep the array alive as long as the search."""
        held = np.ascontiguousarray(array, np.float32)
        self.held.append(held)
        setattr(self.native, name, held.ctypes.data)

    def fill_bytes(self, call: Call) -> Listed:
        """Fill the scale bytes of a call. Returns the indices of the blocks that were left out."""
        library, isa = native()
        columns = call.columns
        irregular = np.empty(call.scales.size, np.int64)

        def run(start: int, stop: int) -> Listed:
            at = start * columns
            found = library.hb_general(
                isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
                ctypes.c_int64(start), ctypes.byref(self.native), pointer(call.scales, at), pointer(irregular, at * 8),
            )  # fmt: skip
            return np.asarray(irregular[at : at + int(found)] + at)

        return np.concatenate(call.over_rows(run))

    def descend(self, call: Call) -> None:
        """Move single codes while rᵀHr falls, if the method asks for it."""
        method = call.request.method
        if not isinstance(method, Hessian) or method.codes != "descent":
            return
        library, isa = native()
        columns, grid = call.columns, grid_of(call.request.format.element)

        def run(start: int, stop: int) -> None:
            library.hb_general_descent(
                isa, pointer(call.x, start * call.row_bytes), ctypes.c_int64(stop - start), ctypes.c_int64(columns),
                ctypes.c_int64(start), ctypes.byref(self.native), ctypes.byref(grid),
                pointer(call.scales, start * columns), pointer(call.codes, start * call.codes.shape[1]),
            )  # fmt: skip

        call.over_rows(run)


@np.errstate(all="ignore")
def nvfp4_search(call: NVFP4Call) -> Search:
    """The search for E4M3 scales, with the numbers of the contract for the tensor or for each row."""
    search, rule, t = Search(call), call.rule, call.t
    by_row = TensorScale(t.amax.reshape(-1, 1), t.factor.reshape(-1, 1), t.largest, t.top, t.statistics)
    divides, constants = element_constants(rule, by_row)
    g = call.multiplier.reshape(-1)
    exponent = (np.frexp(g)[1] - 1).astype(np.int32)
    constant = np.zeros((g.size, 256), np.float32)
    constant[:, :127] = constants
    own = search.native
    own.element = ELEMENTS.index("wraps" if rule.rounding.wraps else rule.rounding.tie)
    own.divides, own.per_row = int(divides), int(call.by_row)
    own.first, own.last = first_scale_byte(rule), E4M3.magnitudes.size - 1
    own.zero_byte = zero_scale_byte(rule, by_row)
    own.most_value, own.zero_below = E2M1.max, 0.25
    search.point("value", np.append(E4M3.magnitudes, np.zeros(129, np.float32)))
    search.point("constant", constant)
    search.point("prescale", np.ldexp(np.float32(1), -exponent))
    search.point("unit", np.ldexp(g, -exponent))
    return search


def row_search(call: NVFP4Call) -> Search:
    """The numbers of rows by TransformerEngine's formulas, from which the library makes the tables of each row."""
    search = Search(call)
    own = search.native
    own.first, own.last = first_scale_byte(call.rule), E4M3.magnitudes.size - 1
    own.element, own.per_row, own.most_value, own.zero_below = ELEMENTS.index("even"), 1, E2M1.max, 0.25
    own.zero_byte = zero_scale_byte(call.rule, call.t)
    search.point("prescale", call.t.factor.reshape(-1))
    search.point("unit", call.multiplier.reshape(-1))
    return search


@np.errstate(all="ignore")
def mx_search(call: MXCall, element_name: str) -> Search:
    """The search for power-of-two scales. Each block has its own k; codes come from `tables_mx.search_tables`."""
    search, element = Search(call), call.request.format.element
    own = search.native
    own.element = ELEMENTS.index(element_name)
    own.first, own.last, own.by_block = 0, E8M0.magnitudes.size - 1, 1
    own.start = int(element.max_exponent)
    own.zero_byte = zero_block_byte(call.rule, element, call.request.dtype)
    own.most_value, own.zero_below = element.max, element.smallest / 2
    values = np.append(E8M0.magnitudes, np.float32(1)).astype(np.float32)
    search.point("value", values)
    search.point("constant", np.float32(1) / values)
    return search


@functools.cache
def grid_of(element: ElementFormat) -> Grid:
    """The finite values of an element format with their codes, in ascending order, with only one zero."""
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
