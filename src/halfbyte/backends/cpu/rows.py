"""Rows with a global scale each. The kernels take those that are in their range, and the reference the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.cpu import headroom, plain
from halfbyte.backends.cpu.call import NVFP4Call, nvfp4_call
from halfbyte.backends.cpu.ranges import each_in_range
from halfbyte.backends.cpu.zeros import quantize_zeros
from halfbyte.backends.headroom import chooser
from halfbyte.backends.protocol import Parts
from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import NVFP4Rule
from halfbyte.request import Request


def quantize_rows(
    x: npt.NDArray[Any],
    rule: NVFP4Rule,
    request: Request,
    own: tuple[F32 | None, int],
    outputs: tuple[U8, U8],
    kernel: Callable[[NVFP4Call], bool],
) -> Parts[npt.NDArray[Any]]:
    """Quantize a matrix of whole blocks.

    own: the given amaxes, if any, and the number of elements without padding.
    """
    largest = plain.tensor_amax(x, request.dtype, True, request.threads)
    amax, size = own
    left = np.ones(len(x), bool)  # rows that are not written yet
    if amax is None:
        asked = chooser(request)
        room = outputs if asked is request else (np.empty_like(outputs[0]), np.empty_like(outputs[1]))
        amax, written = headroom.raised_rows(x, largest, asked, size, room)
        if asked is request:
            left = ~written
    amax = amax.reshape(-1)
    call, stored = nvfp4_call(x, rule, request, (amax, largest), outputs)
    parts: Parts[npt.NDArray[Any]] = Parts(*outputs, stored, call.multiplier)
    served = left & each_in_range(largest, call)
    if served.all() and kernel(call):
        return parts
    zero = left & (largest == 0) & (amax == 0)

    def apart(rows: npt.NDArray[np.bool_], quantize: Callable[[NVFP4Call], object]) -> None:
        """Quantize some rows in arrays of their own."""
        if not rows.any():
            return
        room = tuple(np.empty((int(rows.sum()), part.shape[1]), np.uint8) for part in outputs)
        quantize(nvfp4_call(np.ascontiguousarray(x[rows]), rule, request, (amax[rows], largest[rows]), room)[0])
        for part, made in zip(outputs, room, strict=True):
            part[rows] = made

    apart(served, lambda some: None if kernel(some) else _by_reference(some))
    apart(zero, lambda some: quantize_zeros(some.x, request, some.codes, some.scales))
    apart(left & ~served & ~zero, _by_reference)
    return parts


def _by_reference(call: NVFP4Call) -> None:
    parts = quantize_matrix(call.x, call.request, call.amax)
    call.codes[:], call.scales[:] = parts.codes, parts.scales
