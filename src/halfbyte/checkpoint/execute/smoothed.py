"""Values of a unit with the factors of smoothing folded in. Powers of two: but for the exponent, nothing changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.pieces import Piece
from halfbyte.checkpoint.io.views import NUMPY
from halfbyte.checkpoint.plan.types import Factors, Unit
from halfbyte.codec.bits import BFLOAT16
from halfbyte.errors import CheckpointError
from halfbyte.smoothing import I8, scaled


def values_dtype(unit: Unit) -> np.dtype[Any]:
    """The dtype of a unit's values: its own, or float32 if they are decoded, or scaled in a type of little range."""
    source = unit.sources[0]
    own = NUMPY[source.weight.dtype] if source.kind == "float" else np.dtype(np.float32)
    return own if unit.factors is None or own == BFLOAT16 else np.dtype(np.float32)


def smoothed(unit: Unit, factors: Factors, piece: Piece, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of a weight with the factors folded in."""
    columns, rows = _exponents(factors.columns), _exponents(factors.rows)
    mine = None if rows is None else rows[piece.start : piece.stop]
    return scaled(values, columns, mine, dtype=values_dtype(unit))


def rescaled(unit: Unit, factors: Factors, piece: Piece, raw: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A vector divided by its factors, in its own dtype. Raises if that rounds a value."""
    rows = np.frombuffer(factors.rows, np.int8)[piece.start : piece.stop]
    with np.errstate(over="ignore"):  # Inf does not come back
        found = scaled(raw, None, rows, dtype=raw.dtype)
        again = scaled(found, None, (-rows).astype(np.int8), dtype=raw.dtype)
    if not np.array_equal(again, raw):
        raise CheckpointError(
            f"{unit.module}: {raw.dtype} cannot hold its values divided by the factors; convert without --smooth"
        )
    return found


def _exponents(data: bytes) -> I8 | None:
    return np.frombuffer(data, np.int8) if data else None
