"""Matrices of zeros, which no kernel and no search has to look at: a code depends on its column and sign alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.reference.quantize import quantize_matrix
from halfbyte.codec.bits import F32, U8
from halfbyte.codec.pack import pack, unpack
from halfbyte.request import Request


def quantize_zeros(x: npt.NDArray[Any], request: Request, codes: U8, scales: U8) -> None:
    """Write what the reference gives for a matrix of +0 and −0 whose amaxes are 0.

    The reference quantizes one row (or row of tiles) of each; every row is made of these two.
    """
    height, format = request.tile[0], request.format
    both = np.zeros((2 * height, x.shape[1]), x.dtype)
    both[height:] = -both[height:]
    amax: F32 = np.zeros(len(both) if request.scaling == "row" else 1, np.float32)
    parts = quantize_matrix(both, request, amax)
    plus, minus = parts.codes[0], parts.codes[height]
    codes[:], scales[:] = plus, parts.scales[0]
    negative = x.view(f"u{x.dtype.itemsize}") != 0
    rows = np.flatnonzero(negative.any(axis=1))
    if rows.size and not np.array_equal(plus, minus):
        of_signs = (unpack(one, x.shape[1], format) for one in (minus, plus))
        codes[rows] = pack(np.where(negative[rows], *of_signs), format)
