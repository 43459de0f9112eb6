"""The memory plan against what a worker really takes, for each kind of source, at the smallest limit that is accepted."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.conversion import sizes_for
from halfbyte.checkpoint.execute.pieces import SLACK
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.plan.types import Plan
from halfbyte.errors import InputError
from tests.checkpoint.toy import Array, random, write_checkpoint

DOWN = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 6, 1 << 19
"""Rows so long that what one of them takes is far more than the slack of the plan and the rest of the process."""
PACKED = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}


def floats(dtype: Any) -> dict[str, Array]:
    return {f"{DOWN}.weight": random(0, ROWS, COLUMNS, dtype=dtype)}


def fp8(scale: Array) -> dict[str, Array]:
    return {f"{DOWN}.weight": random(0, ROWS, COLUMNS, dtype=ml_dtypes.float8_e4m3fn), f"{DOWN}.weight_scale": scale}


def packed(names: tuple[str, str], dtype: Any, scale: Array) -> dict[str, Array]:
    codes = np.random.default_rng(0).integers(0, 256, (ROWS, COLUMNS // 2), dtype=np.uint8)
    return {f"{DOWN}.{names[0]}": codes.view(dtype), f"{DOWN}.{names[1]}": scale}


def int4() -> dict[str, Array]:
    tensors = packed(("weight_packed", "weight_scale"), np.int32, np.abs(random(1, ROWS, COLUMNS // 32)))
    return tensors | {f"{DOWN}.weight_shape": np.array([ROWS, COLUMNS])}


def mxfp4() -> dict[str, Array]:
    scales = np.random.default_rng(1).integers(120, 126, (ROWS, COLUMNS // 32), dtype=np.uint8)
    return packed(("weight_packed", "weight_scale"), np.uint8, scales)


def nvfp4() -> dict[str, Array]:
    scales = np.random.default_rng(1).integers(8, 120, (ROWS, COLUMNS // 16), dtype=np.uint8)
    tensors = packed(("weight", "weight_scale"), np.uint8, scales.view(ml_dtypes.float8_e4m3fn))
    return tensors | {f"{DOWN}.weight_scale_2": np.float32(0.01).reshape(())}


KINDS: dict[str, tuple[dict[str, Array], dict[str, Any], Options]] = {
    "bf16": (floats(ml_dtypes.bfloat16), {}, Options(method="amax")),
    "fp32": (floats(np.float32), {}, Options(method="amax")),
    "bf16 to mxfp4": (floats(ml_dtypes.bfloat16), {}, Options(to="mxfp4", layout="compressed-tensors")),
    "fp8, one scale": (fp8(np.float32([0.01])), {"quant_method": "fp8"}, Options(method="amax")),
    "fp8, blocks": (
        fp8(random(1, 1, COLUMNS // 128, dtype=np.float32)),
        {"quant_method": "fp8"},
        Options(method="amax"),
    ),
    "fp8 to bf16": (fp8(np.float32([0.01])), {"quant_method": "fp8"}, Options(to="bf16")),
    "int4": (int4(), PACKED, Options(method="amax")),
    "int4 to bf16": (int4(), PACKED, Options(to="bf16")),
    "mxfp4": (mxfp4(), MXFP4, Options()),
    "mxfp4 to bf16": (mxfp4(), MXFP4, Options(to="bf16")),
    "nvfp4": (nvfp4(), NVFP4, Options(layout="compressed-tensors")),
    "nvfp4 to bf16": (nvfp4(), NVFP4, Options(to="bf16")),
}


def least_memory(plan: Plan) -> int:
    """The smallest limit that one worker accepts."""
    low, high = 1, 1 << 32
    while low < high:
        middle = (low + high) // 2
        try:
            sizes_for(plan, Resources(workers=1, max_memory=middle))
        except InputError:
            low = middle + 1
        else:
            high = middle
    return low


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_takes_no_more_than_was_planned(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, quantized, options = KINDS[kind]
    config = {"quantization_config": quantized} if quantized else {}
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors, config), options)
    run(plan, tmp_path / "warm", Resources(workers=1, sync=False))  # tables that are kept belong to the process
    limit = least_memory(plan)
    sizes, _ = sizes_for(plan, Resources(workers=1, max_memory=limit))
    taken = 0

    class Watched(Arena):
        def take(self, size: int) -> Any:
            nonlocal taken
            found = super().take(size)
            taken = max(taken, self.mark())
            return found

    monkeypatch.setattr("halfbyte.checkpoint.execute.unit.Arena", Watched)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        run(plan, tmp_path / "d", Resources(workers=1, max_memory=limit, sync=False))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    beside = peak - before - sizes.arena
    print(kind, limit, sizes.arena, taken, beside)
    assert taken + beside <= sizes.arena + SLACK
