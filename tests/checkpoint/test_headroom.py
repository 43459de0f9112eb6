"""Conversions and the headroom of Optimal: the bytes of `hb.quantize`, however the work is cut; groups share one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.backends.headroom import SMALL
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.unit import UnitWork
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import all_bytes, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
USUAL = Resources(workers=2, max_memory=1 << 28, sync=False)
MLP = "model.layers.0.mlp"
GATE, UP, DOWN = (f"{MLP}.{name}_proj" for name in ("gate", "up", "down"))
QKV = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]


def uniform(seed: int, *shape: int, dtype: npt.DTypeLike = ml_dtypes.bfloat16) -> Array:
    """As torch fills a new linear layer: headroom 2 is far better than 1."""
    return np.random.default_rng(seed).uniform(-0.1, 0.1, shape).astype(np.float32).astype(dtype)


def lonely(seed: int, *shape: int, dtype: npt.DTypeLike = ml_dtypes.bfloat16) -> Array:
    """Codes of NVFP4 under the usual tensor scale, decoded: headroom 1 loses nothing, headroom 2 does."""
    x = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    x[0, 0] = 40.0
    q = hb.quantize(x, "nvfp4", "modelopt", "amax")
    return np.asarray(hb.dequantize(q)).astype(dtype)


def multiplier(x: Array, method: str | Method = "optimal") -> Array:
    return np.asarray(hb.quantize(x, "nvfp4", "modelopt", method).global_scale)


def converted(folder: Path, tensors: dict[str, Array], method: str = "optimal", shards: int = 2) -> dict[str, Array]:
    source = write_checkpoint(folder / "s", tensors, shards=shards)
    run(make_plan(source, Options(method=method)), folder / "d", USUAL)
    return read_checkpoint(folder / "d")


def assert_like_one_tensor(made: dict[str, Array], tensors: dict[str, Array], modules: list[str]) -> None:
    """Modules that share a scale have the bytes of one tensor that holds all of their rows."""
    weights = [tensors[f"{module}.weight"] for module in modules]
    whole = hb.quantize(np.concatenate(weights), "nvfp4", "modelopt", "optimal")
    start = 0
    for module, weight in zip(modules, weights, strict=True):
        q = whole[start : start + len(weight)]
        start += len(weight)
        assert_same_bits(made[f"{module}.weight"], q.codes)
        assert_same_bits(made[f"{module}.weight_scale"], q.scales)
        assert q.global_scale is not None
        assert_same_bits(made[f"{module}.weight_scale_2"], q.global_scale)


def mixed_model(dtype: npt.DTypeLike = ml_dtypes.bfloat16) -> dict[str, Array]:
    """Groups of one, two and three; partners of other sizes."""
    tensors = {GATE: uniform(1, 96, 64, dtype=dtype), UP: uniform(2, 96, 64, dtype=dtype) / 2}
    tensors[DOWN] = lonely(3, 64, 96, dtype=dtype)
    tensors |= {
        module: uniform(4 + at, rows, 64, dtype=dtype)
        for at, (module, rows) in enumerate(zip(QKV, (64, 16, 16), strict=True))
    }
    return {f"{module}.weight": x for module, x in tensors.items()}


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
def test_each_group_has_the_headroom_of_one_tensor(tmp_path: Path, dtype: npt.DTypeLike) -> None:
    tensors = mixed_model(dtype)
    made = converted(tmp_path, tensors)
    for modules in ([GATE, UP], [DOWN], QKV):
        assert_like_one_tensor(made, tensors, modules)
    one = {module: multiplier(tensors[f"{module}.weight"], hb.Optimal(headroom=1)) for module in (GATE, DOWN)}
    assert made[f"{GATE}.weight_scale_2"] > one[GATE]  # some headroom was taken
    assert made[f"{DOWN}.weight_scale_2"] == one[DOWN]  # and none where it does not pay


def test_partners_that_would_choose_differently_choose_together(tmp_path: Path) -> None:
    """Alone, gate takes 2 and up takes 1. Whoever has more to gain decides for both."""
    gate, up = uniform(1, 96, 64), lonely(2, 96, 64)
    up = (up.astype(np.float32) * 0.1 / float(np.abs(up.astype(np.float32)).max())).astype(up.dtype)
    tensors = {f"{GATE}.weight": gate, f"{UP}.weight": up}
    alone = [multiplier(x) / multiplier(x, hb.Optimal(headroom=1)) for x in (gate, up)]
    assert alone[0] > alone[1] == 1
    made = converted(tmp_path, tensors)
    assert_like_one_tensor(made, tensors, [GATE, UP])
    assert_same_bits(made[f"{GATE}.weight_scale_2"], made[f"{UP}.weight_scale_2"])


def test_weights_that_four_over_six_wrote_take_its_headroom(tmp_path: Path) -> None:
    """448/256 loses nothing on them. Gate alone is small enough to try it; with up, a sample has to speak for it."""
    x = np.random.default_rng(0).standard_normal((96, 512)).astype(np.float32)
    gate = np.asarray(hb.dequantize(hb.quantize(x, "nvfp4", "modelopt", hb.FourSix("mse", 256)))).astype(x.dtype)
    assert gate.size <= SMALL < 2 * gate.size
    small, large = tmp_path / "small", tmp_path / "large"
    made = converted(small, {f"{DOWN}.weight": gate})
    assert_like_one_tensor(made, {f"{DOWN}.weight": gate}, [DOWN])
    assert made[f"{DOWN}.weight_scale_2"] == multiplier(gate, hb.Optimal(headroom=1.75))
    both = {f"{GATE}.weight": gate, f"{UP}.weight": gate}
    made = converted(large, both)
    assert_like_one_tensor(made, both, [GATE, UP])
    assert made[f"{GATE}.weight_scale_2"] == multiplier(gate, hb.Optimal(headroom=1.75))


@pytest.mark.parametrize(
    "resources",
    [
        Resources(workers=1, max_memory=1 << 28, sync=False),
        Resources(workers=3, max_memory=1 << 28, sync=False, chunk=1),
        Resources(workers=2, max_memory=1 << 28, sync=False, chunk=1000),
        Resources(workers=2, max_memory=1_200_000, sync=False),
        Resources(workers=16, max_memory=1 << 28, sync=False, chunk=300),
    ],
    ids=["one", "rows", "odd", "tight", "many"],
)
def test_no_cut_changes_the_choice(tmp_path: Path, resources: Resources) -> None:
    """Pieces of a row, one worker or many, partners in other shards, memory for one piece."""
    plan = make_plan(write_checkpoint(tmp_path / "s", mixed_model(), shards=3), Options())
    run(plan, tmp_path / "usual", USUAL)
    run(plan, tmp_path / "other", resources)
    assert all_bytes(tmp_path / "usual") == all_bytes(tmp_path / "other")


@pytest.mark.parametrize("headroom", ["1", "2", "1.5"])
def test_a_headroom_may_be_asked_for(tmp_path: Path, headroom: str) -> None:
    tensors = {f"{DOWN}.weight": uniform(0, 64, 96)}
    made = converted(tmp_path, tensors, f"optimal:headroom={headroom}", shards=1)
    q = hb.quantize(tensors[f"{DOWN}.weight"], "nvfp4", "modelopt", hb.Optimal(headroom=float(headroom)))
    assert_same_bits(made[f"{DOWN}.weight"], q.codes)
    assert q.global_scale is not None
    assert_same_bits(made[f"{DOWN}.weight_scale_2"], q.global_scale)


@pytest.mark.parametrize("headroom", [(1.0, 1.5), None])
def test_candidates_that_no_first_look_decides_between_are_read_once_for_it(
    tmp_path: Path, headroom: tuple[float, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that does not fit is read for its amax, for its headroom, and to be written."""
    x = uniform(4, 128, 256)
    source = write_checkpoint(tmp_path / "s", {f"{DOWN}.weight": x})
    read: list[int] = []
    real = UnitWork.read

    def counted(self: UnitWork, unit: Any, piece: Any, arena: Any) -> Any:
        read.append(piece.number)
        return real(self, unit, piece, arena)

    monkeypatch.setattr(UnitWork, "read", counted)
    monkeypatch.setattr(UnitWork, "holds", lambda *arguments: False)
    method = hb.Optimal(headroom=headroom)
    run(make_plan(source, Options(method=method)), tmp_path / "d", Resources(1, 1 << 24, sync=False, chunk=1 << 14))
    assert len(read) <= 2 * len(set(read)), "for the headroom, and where no call reads on the way"
    assert_same_bits(
        read_checkpoint(tmp_path / "d")[f"{DOWN}.weight"], hb.quantize(x, "nvfp4", "modelopt", method).codes
    )
