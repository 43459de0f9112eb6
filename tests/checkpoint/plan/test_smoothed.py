"""Factors of smoothing against the weights of a plan: what fits is given to units, what does not is refused, whole."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from halfbyte.checkpoint import Options, Plan, Rules, make_plan
from halfbyte.checkpoint.plan.smoothed import factors_of
from halfbyte.checkpoint.plan.types import Factors
from halfbyte.errors import CheckpointError
from halfbyte.smoothing import FILE, Link, Smoothing, write_smoothing
from tests.checkpoint.toy import random, write_checkpoint

AT = "model.layers.0"
NORM, GATE, UP, DOWN = f"{AT}.norm", f"{AT}.mlp.gate_proj", f"{AT}.mlp.up_proj", f"{AT}.mlp.down_proj"
TENSORS = {
    f"{NORM}.weight": random(0, 64),
    f"{GATE}.weight": random(1, 32, 64),
    f"{UP}.weight": random(2, 32, 64),
    f"{UP}.bias": random(3, 32),
    f"{DOWN}.weight": random(4, 64, 32),
}
ONES, TWOS = np.ones(64, np.int8), np.full(32, 2, np.int8)
FROM_NORM, FROM_UP = Link(NORM, (GATE, UP), True, ONES), Link(UP, (DOWN,), False, TWOS)


def plan_of(folder: Path, *links: Link, keep: tuple[str, ...] = ()) -> Plan:
    source = write_checkpoint(folder / "s", TENSORS)
    return make_plan(source, Options(smoothing=Smoothing(links), rules=Rules(keep=keep)))


def refused(folder: Path, *links: Link, keep: tuple[str, ...] = ()) -> str:
    with pytest.raises(CheckpointError) as caught:
        plan_of(folder, *links, keep=keep)
    return str(caught.value)


def test_each_unit_has_its_factors(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, FROM_NORM, FROM_UP)
    assert {unit.module: (unit.action, unit.factors) for unit in plan.units} == {
        f"{NORM}.weight": ("rescale", Factors(rows=ONES.tobytes())),
        f"{UP}.bias": ("rescale", Factors(rows=TWOS.tobytes())),
        GATE: ("quantize", Factors(columns=ONES.tobytes())),
        UP: ("quantize", Factors(columns=ONES.tobytes(), rows=TWOS.tobytes())),
        DOWN: ("quantize", Factors(columns=TWOS.tobytes())),
    }
    (norm,) = [unit for unit in plan.units if unit.module == f"{NORM}.weight"]
    (source,), (output,) = norm.sources, norm.outputs
    assert (source.kind, source.rows, source.columns) == ("float", 64, 1)
    assert (source.weight.tensor, source.weight.rows, source.weight.row_stride) == (f"{NORM}.weight", 64, 1)
    assert (output.part.name, output.part.dtype, output.part.shape) == (f"{NORM}.weight", "BF16", (64,))
    assert (norm.group, norm.input_scale) == (-1, None)
    assert not [copy for shard in plan.shards for copy in shard.copies]
    assert plan.json_files[FILE] == Smoothing((FROM_NORM, FROM_UP)).as_json()
    assert FILE not in make_plan(tmp_path / "s", Options()).json_files
    assert factors_of(None, UP) is factors_of(Smoothing((FROM_NORM,)), DOWN) is None


def test_a_file_of_factors(tmp_path: Path) -> None:
    write_smoothing(tmp_path / "x.json", Smoothing((FROM_NORM,)))
    plan = plan_of(tmp_path, FROM_NORM)
    other = make_plan(tmp_path / "s", Options(smoothing=tmp_path / "x.json"))
    assert other.fingerprint == plan.fingerprint
    with pytest.raises(CheckpointError, match=r"^--smooth: .*gone\.json"):
        make_plan(tmp_path / "s", Options(smoothing=tmp_path / "gone.json"))


@pytest.mark.parametrize(
    ("link", "keep", "message"),
    [
        (FROM_NORM, (GATE,), f"factors for {GATE}, which is not quantized from values; fit them anew"),
        (FROM_UP, (UP,), f"factors for {UP}, which is not quantized from values; fit them anew"),
        (replace(FROM_NORM, origin="x"), (), "x is no norm of 64 channels"),
        (replace(FROM_NORM, exponents=TWOS), (), f"{NORM} is no norm of 32 channels"),
        (replace(FROM_NORM, into=(DOWN,)), (), f"{DOWN} has 32 columns, but 64 factors"),
        (replace(FROM_UP, exponents=ONES), (), f"{UP} has 32 rows, but 64 factors"),
        (replace(FROM_UP, into=(GATE,)), (), f"{GATE} has 64 columns, but 32 factors"),
    ],
)
def test_factors_that_do_not_fit(tmp_path: Path, link: Link, keep: tuple[str, ...], message: str) -> None:
    assert refused(tmp_path, link, keep=keep) == f"--smooth: {message}"


def test_a_norm_of_integers(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", TENSORS | {f"{NORM}.weight": np.ones(64, np.int32)})
    with pytest.raises(CheckpointError, match=f"^--smooth: {NORM} is no norm of 64 channels$"):
        make_plan(source, Options(smoothing=Smoothing((FROM_NORM,))))
