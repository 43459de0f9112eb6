"""`convert` casts MXFP4 as `hb.cast` does: the same bytes for any spread, layout, chunk size and number of workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.testing import assert_same_bits
from tests.casting.sources import source
from tests.checkpoint.toy import read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
DOWN = "model.layers.0.mlp.down_proj"


def checkpoint(folder: Path, modules: dict[str, hb.QuantizedTensor], shards: int = 1) -> Path:
    """A compressed-tensors checkpoint of MXFP4 matrices."""
    tensors: dict[str, Array] = {}
    for module, q in modules.items():
        tensors |= {f"{module}.weight_packed": np.asarray(q.codes), f"{module}.weight_scale": np.asarray(q.scales)}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    return write_checkpoint(folder, tensors, config, shards=shards)


EVERY = np.where(np.arange(32) % 16 == 8, 0, np.arange(32) % 16)
"""Codes of a block with every magnitude; without 8, which readers of one layout take for +0.0."""

KEPT_AT_18 = {
    "sixes below": (EVERY, np.resize([7, 15], 32)),
    "halves above": (np.resize([1, 9], 32), EVERY),
    "multiples of three": (np.resize([3, 5, 7, 11, 13, 15], 32), np.resize([3, 13, 7], 32)),
}
"""Codes of two blocks whose exponents lie 18 apart, the larger one first. Some global scale keeps both."""


@pytest.mark.parametrize("kind", KEPT_AT_18)
@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_a_spread_of_18_that_cast_keeps_is_kept(tmp_path: Path, kind: str, layout: str) -> None:
    q = source(np.array([[0, -18]]), np.concatenate(KEPT_AT_18[kind])[None])
    assert hb.cast(q, "nvfp4")[1].lossless
    plan = make_plan(checkpoint(tmp_path / "s", {DOWN: q}), Options(layout=layout))
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    run(make_plan(tmp_path / "d", Options(to="bf16")), tmp_path / "plain", Resources(workers=1, sync=False))
    assert_same_bits(read_checkpoint(tmp_path / "plain")[f"{DOWN}.weight"], hb.dequantize(q, "bfloat16"))
    assert json.loads((tmp_path / "d" / "halfbyte.json").read_text())["changed_blocks"] == {}
