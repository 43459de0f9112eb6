"""Any format to bfloat16: decode, round once, and say whether that changed a value."""

from __future__ import annotations

import numpy as np

from halfbyte.arrays import Array, like, to_numpy
from halfbyte.casting.measure import CHUNK, rows_of, tally_values
from halfbyte.casting.report import CastReport, add, describe
from halfbyte.quantize import dequantize
from halfbyte.types import QuantizedTensor


def cast_to_bfloat16(q: QuantizedTensor, backend: str, threads: int | None) -> tuple[Array, CastReport]:
    """The decoded tensor in bfloat16. NaN stays NaN and Inf stays Inf."""
    rows, width = int(np.prod(q.shape[:-1])), q.shape[-1]
    step = max(CHUNK // width, 1)
    parts, tallies = [], []
    for start in range(0, rows, step):
        part = rows_of(q, start, start + step)
        exact = to_numpy(dequantize(part, "float32", backend, threads))
        rounded = to_numpy(dequantize(part, "bfloat16", backend, threads))
        parts.append(rounded)
        tallies.append(tally_values(exact, rounded.astype(np.float32), q.format.block, None, False))
    report = describe(add(tallies), q.format.name, "bfloat16", "decode", q.shape)
    return like(np.concatenate(parts).reshape(q.shape), q.codes), report
