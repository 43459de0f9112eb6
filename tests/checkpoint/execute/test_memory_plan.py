"""The memory plan: with the least memory that a run accepts, what it really takes stays within that."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from halfbyte.checkpoint import Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute.conversion import sizes_for
from halfbyte.checkpoint.execute.pieces import SLACK, largest_piece
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.codec.bits import U8
from halfbyte.errors import InputError
from tests.checkpoint.execute.test_pieces import stand_in
from tests.checkpoint.toy import all_bytes, random, write_checkpoint

Array = npt.NDArray[Any]
Source = tuple[dict[str, Array], dict[str, Any]]
"""Tensors, and what config.json says of them."""
E4M3 = ml_dtypes.float8_e4m3fn
AT = "model.layers.0.mlp.down_proj"
EXPERTS = "model.layers.0.mlp.experts"
OBJECTS = 60_000
"""Bytes that Python's own objects take during the work."""


def bytes_of(*shape: int) -> Array:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def plain(dtype: npt.DTypeLike) -> Callable[[int, int], Source]:
    return lambda rows, columns: ({f"{AT}.weight": random(0, rows, columns, dtype=dtype)}, {})


def fp8(tall: int, wide: int) -> Callable[[int, int], Source]:
    """One scale per block of that size; 0: the whole length."""

    def make(rows: int, columns: int) -> Source:
        grid = np.ones((-(-rows // (tall or rows)), -(-columns // (wide or columns))), np.float32)
        weight = (bytes_of(rows, columns) & 0x77).view(E4M3)
        return {f"{AT}.weight": weight, f"{AT}.weight_scale": grid}, {"quantization_config": {"quant_method": "fp8"}}

    return make


def int4(rows: int, columns: int) -> Source:
    tensors = {
        f"{AT}.weight_packed": bytes_of(rows, columns // 2).view(np.int32),
        f"{AT}.weight_scale": random(1, rows, columns // 32),
        f"{AT}.weight_shape": np.array([rows, columns]),
    }
    return tensors, {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}


def mxfp4(rows: int, columns: int) -> Source:
    scales = 120 + bytes_of(rows, columns // 32) % 6
    tensors = {f"{AT}.weight_packed": bytes_of(rows, columns // 2), f"{AT}.weight_scale": scales}
    return tensors, {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}


def nvfp4(rows: int, columns: int) -> Source:
    tensors = {
        f"{AT}.weight": bytes_of(rows, columns // 2),
        f"{AT}.weight_scale": (bytes_of(rows, columns // 16) % 100 + 8).view(E4M3),
        f"{AT}.weight_scale_2": np.array(0.01, np.float32),
    }
    return tensors, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def gpt_oss(rows: int, columns: int) -> dict[str, Any]:
    return {"model_type": "gpt_oss", "hidden_size": columns, "intermediate_size": rows}


def stacked(rows: int, columns: int) -> Source:
    """Gate and up in turns, transposed: a row of theirs is a column of the file, every other one."""
    return {f"{EXPERTS}.gate_up_proj": random(0, 1, columns, 2 * rows)}, gpt_oss(rows, columns)


def stacked_mxfp4(rows: int, columns: int) -> Source:
    """Gate and up in turns: every other row of the file."""
    tensors = {
        f"{EXPERTS}.gate_up_proj_blocks": bytes_of(1, 2 * rows, columns // 32, 16),
        f"{EXPERTS}.gate_up_proj_scales": 120 + bytes_of(1, 2 * rows, columns // 32) % 6,
    }
    return tensors, {**gpt_oss(rows, columns), "quantization_config": {"quant_method": "mxfp4"}}


AMAX, TO_BF16 = Options(method="amax"), Options(to="bf16")
TO_MXFP4, OTHER_LAYOUT = Options(to="mxfp4", layout="compressed-tensors"), Options(layout="compressed-tensors")
CASES: dict[str, tuple[Callable[[int, int], Source], Options]] = {
    "bf16": (plain(ml_dtypes.bfloat16), AMAX),
    "bf16 optimal": (plain(ml_dtypes.bfloat16), Options(method="optimal")),
    "bf16 to mxfp4": (plain(ml_dtypes.bfloat16), TO_MXFP4),
    "fp16": (plain(np.float16), AMAX),
    "fp32": (plain(np.float32), AMAX),
    "fp8 in blocks": (fp8(128, 128), AMAX),
    "fp8 in blocks of a row": (fp8(1, 128), AMAX),
    "fp8 by channel": (fp8(1, 0), AMAX),
    "fp8 by tensor to bf16": (fp8(0, 0), TO_BF16),
    "int4": (int4, AMAX),
    "int4 to bf16": (int4, TO_BF16),
    "mxfp4 cast": (mxfp4, AMAX),
    "mxfp4 to bf16": (mxfp4, TO_BF16),
    "mxfp4 moved": (mxfp4, TO_MXFP4),
    "nvfp4 moved": (nvfp4, OTHER_LAYOUT),
    "nvfp4 to bf16": (nvfp4, TO_BF16),
    "nvfp4 to mxfp4": (nvfp4, TO_MXFP4),
    "stacked": (stacked, Options(method="amax", layout="compressed-tensors")),
    "stacked mxfp4 moved": (stacked_mxfp4, TO_MXFP4),
}


def least_memory(plan: Plan) -> int:
    """The smallest limit that is not refused."""
    low, high = 1, 1 << 30
    while low < high:
        middle = (low + high) // 2
        try:
            sizes_for(plan, Resources(workers=1, max_memory=middle))
            high = middle
        except InputError:
            low = middle + 1
    return low


class NotedArena(Arena):
    """Remembers how much of it was in use at most."""

    most = 0

    def take(self, size: int) -> U8:
        taken = super().take(size)
        self.most = max(self.most, self.mark())
        return taken


@dataclass
class Taken:
    """What the only worker of a run took."""

    arena: int = 0
    """Bytes of its arena that it used."""
    beside: int = 0
    """Bytes at most at a time that it allocated elsewhere."""
    planned: int = 0
    """Bytes of its arena."""

    @contextlib.contextmanager
    def watch(self, work: UnitWork, size: int) -> Iterator[Arena]:
        tracemalloc.start()
        arena = NotedArena(size)
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        try:
            yield arena
        finally:
            self.beside = tracemalloc.get_traced_memory()[1] - before
            self.arena, self.planned = arena.most, size
            tracemalloc.stop()


@pytest.mark.parametrize(
    ("case", "rows", "columns"),
    [
        *((case, 2, 1 << 19) for case in CASES if case != "stacked"),
        *((case, 500, 4096) for case in CASES if case.startswith(("fp8", "int4"))),  # decoded several rows at a time
        ("stacked", 1024, 2048),
    ],
)
def test_what_is_taken_is_what_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, rows: int, columns: int
) -> None:
    make, options = CASES[case]
    tensors, config = make(rows, columns)
    source = write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1, **config})
    plan = make_plan(source, options)
    run(plan, tmp_path / "roomy", Resources(workers=1, sync=False))
    taken = Taken()
    monkeypatch.setattr(UnitWork, "arena", lambda work, size: taken.watch(work, size))
    run(plan, tmp_path / "tight", Resources(workers=1, max_memory=least_memory(plan), sync=False))
    assert taken.arena + taken.beside <= taken.planned + OBJECTS
    assert all_bytes(tmp_path / "tight") == all_bytes(tmp_path / "roomy")


def test_a_worker_has_room_for_the_largest_piece_and_some_slack() -> None:
    unit = stand_in()
    plan: Any = SimpleNamespace(units=[unit], calibrated=None)
    needed = largest_piece(unit, 1) + SLACK
    least = -(-needed * 10 // 9)
    sizes, workers = sizes_for(plan, Resources(workers=1, max_memory=least, chunk=1))
    assert (sizes.chunk, workers) == (1, 1)
    assert needed <= sizes.arena <= needed + 1
    with pytest.raises(InputError, match=f"a piece of the largest tensor needs {needed:,}"):
        sizes_for(plan, Resources(workers=1, max_memory=least - 2, chunk=1))
    assert sizes_for(plan, Resources(workers=3, max_memory=2 * least, chunk=1))[1] == 2
