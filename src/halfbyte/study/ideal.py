"""Two limits: the error with block scales that are real numbers, and the error of any code with the same bits."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.formats import E2M1

F64 = npt.NDArray[np.float64]

VALUES = E2M1.magnitudes.astype(np.float64)
MIDDLES = (VALUES[1:] + VALUES[:-1]) / 2
CHUNK = 4096


def ideal_squared_errors(blocks: npt.NDArray[np.floating]) -> F64:
    """The least squared error of each row over all positive real scales, with nearest codes.

    Let the scale s fall from infinity. The code of an element rises by one each time s passes |x| divided by the
    midpoint of two neighbouring values. Between two such events the codes q are fixed, and the best scale for them is
    Σq|x| / Σq², with the error Σx² − (Σq|x|)²/Σq². The optimum is one of these, so their minimum is the optimum. All 7
    events per element are tried, in order.
    """
    return np.concatenate(
        [_chunk(np.abs(blocks[start : start + CHUNK]).astype(np.float64)) for start in range(0, len(blocks), CHUNK)]
    )


def _chunk(x: F64) -> F64:
    events = (x[:, :, None] / MIDDLES).reshape(len(x), -1)
    rise = (x[:, :, None] * np.diff(VALUES)).reshape(len(x), -1)
    squares = np.broadcast_to(np.diff(VALUES**2), (*x.shape, len(MIDDLES))).reshape(len(x), -1)
    order = np.argsort(-events, axis=1)
    along = np.cumsum(np.take_along_axis(rise, order, axis=1), axis=1)
    norm = np.cumsum(np.take_along_axis(squares, order, axis=1), axis=1)
    explained = (along**2 / norm).max(axis=1)
    return np.asarray(np.maximum((x**2).sum(axis=1) - explained, 0.0))


def shannon_bound(bits: float) -> float:
    """2^-bits: no code with `bits` bits per number has a smaller relative RMS error on independent normal numbers.

    Other data of the same variance can always be coded at least as well as normal numbers.
    """
    return float(2.0**-bits)
