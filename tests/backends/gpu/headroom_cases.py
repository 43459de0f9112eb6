"""Operands for the choice of headroom: blocks near the amax, blocks far below it, amaxes at the ends of float32."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte import contracts
from halfbyte.codec.bits import DTYPES

CONTRACTS = [
    contracts.transformer_engine(),
    contracts.modelopt(),
    contracts.compressed_tensors(),
    contracts.torchao(),
    contracts.fouroversix(),
    contracts.flashinfer(),
    contracts.vllm(),
]
"""Contracts with a tensor scale."""

KINDS = (
    "uniform", "gauss", "wide", "low", "tiny", "subnormal", "huge", "2**91", "zeros", "nan", "inf", "zero blocks",
)  # fmt: skip


@np.errstate(all="ignore")
def operand(kind: str, dtype: str, rows: int, columns: int, seed: int = 0) -> npt.NDArray[np.generic]:
    """A matrix of the kind in the dtype."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns))
    blocks = (rows, columns // 16)
    if kind == "uniform":  # many blocks near the amax
        x = rng.uniform(-1, 1, (rows, columns))
    elif kind == "wide":
        x *= np.exp2(-rng.integers(0, 24, blocks)).repeat(16, axis=1)
    elif kind == "low":  # most scales are subnormal under twice the amax
        x = rng.uniform(-1, 1, (rows, columns)) * np.exp2(-rng.integers(8, 14, blocks)).repeat(16, axis=1)
        x[0, 0] = 1
    elif kind in ("tiny", "subnormal", "huge", "2**91"):
        x = rng.uniform(-1, 1, (rows, columns))
        x *= {"tiny": 1e-36, "subnormal": 1e-40, "huge": float(FMAX[dtype]), "2**91": 2.0**91}[kind]
        if dtype == "fp16" and kind != "huge":  # its own small numbers; and amaxes for which a factor in float16 is Inf
            x = rng.uniform(-1, 1, (rows, columns)) * (2.0**-16 if kind != "2**91" else 0.03)
    elif kind == "zeros":
        x *= 0
    elif kind in ("nan", "inf"):
        x[rows // 2, columns // 2] = float(kind)
    elif kind == "zero blocks":
        x = rng.uniform(-1, 1, (rows, columns)) * rng.integers(0, 2, blocks).repeat(16, axis=1)
    return x.astype(DTYPES[dtype])


FMAX = {"fp16": 65504, "bf16": 3.3e38, "fp32": 3.4e38}
