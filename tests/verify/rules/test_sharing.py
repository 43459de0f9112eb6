"""Scales of fused layers, and scales that are none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.models.partners import FusedLayers, fused_layers
from halfbyte.verify.rules.sharing import CONSEQUENCE, scalar_problems, sharing_problems
from halfbyte.verify.stored import read_contents
from tests.samples import f32
from tests.tiny_models import BF16, E4M3, Tensors
from tests.verify.headers import lines, opened

ANY = fused_layers()


def modelopt(name: str, scale: float = 1, inputs: float | None = None) -> Tensors:
    found: Tensors = {
        f"{name}.weight": np.zeros((2, 8), np.uint8),
        f"{name}.weight_scale": np.ones((2, 1), E4M3),
        f"{name}.weight_scale_2": np.asarray(np.float32(scale)),
    }
    return found | ({} if inputs is None else {f"{name}.input_scale": np.asarray(np.float32(inputs))})


def compressed(name: str, scale: float = 1) -> Tensors:
    return {
        f"{name}.weight_packed": np.zeros((2, 8), np.uint8),
        f"{name}.weight_scale": np.ones((2, 1), E4M3),
        f"{name}.weight_global_scale": f32(scale),
    }


def mxfp4(name: str) -> Tensors:
    return {f"{name}.weight_packed": np.zeros((2, 16), np.uint8), f"{name}.weight_scale": np.ones((2, 1), np.uint8)}


PLAIN = np.zeros((2, 16), BF16)


def shared(path: Path, tensors: Tensors, fused: FusedLayers = ANY) -> list[str]:
    made = opened(path, tensors)
    return lines(sharing_problems(path, read_contents(made), fused))


MIX = "with which servers fuse it, is"


def test_members_that_are_stored_in_different_ways(tmp_path: Path) -> None:
    """Each against the first that is quantized; groups without any are not looked at."""
    tensors = {"l.q_proj.weight": PLAIN, **modelopt("l.k_proj"), **compressed("l.v_proj")}
    tensors |= {"l.gate_proj.weight": PLAIN, "l.up_proj.weight": PLAIN, **mxfp4("l.o_proj")}
    assert shared(tmp_path, tensors) == [
        f"error [fused-mix] l.q_proj: unquantized, but l.k_proj, {MIX} nvfp4 (modelopt)",
        f"error [fused-mix] l.v_proj: nvfp4 (compressed-tensors), but l.k_proj, {MIX} nvfp4 (modelopt)",
    ]


def test_tensor_scales_and_input_scales(tmp_path: Path) -> None:
    """Equal to the bit, among those that are there."""
    tensors = modelopt("l.q_proj", 0.1, 3) | modelopt("l.k_proj", 0.1) | modelopt("l.v_proj", 0.2, 4)
    tensors |= modelopt("l.gate_proj", 5) | modelopt("m.up_proj", 6) | modelopt("l.o_proj", 7)
    assert shared(tmp_path / "a", tensors) == [
        "error [shared-scale] l.v_proj.weight_scale_2: is 0.200000003, but l.q_proj.weight_scale_2 is 0.100000001: "
        + CONSEQUENCE,
        f"error [shared-scale] l.v_proj.input_scale: is 4, but l.q_proj.input_scale is 3: {CONSEQUENCE}",
    ]
    assert shared(tmp_path / "b", mxfp4("l.gate_proj") | mxfp4("l.up_proj")) == []
    assert shared(tmp_path / "c", modelopt("l.gate_proj", 5) | modelopt("l.up_proj", 5)) == []


def test_what_is_fused_is_asked_of_the_model(tmp_path: Path) -> None:
    tensors = modelopt("h.0.mlp.w1", 1) | modelopt("h.0.mlp.w2", 2)
    assert shared(tmp_path / "a", tensors) == []
    assert len(shared(tmp_path / "b", tensors, fused_layers("qwen"))) == 1


LARGEST = 65504 / (6 * 448)


@pytest.mark.parametrize(
    ("scale", "told"),
    [
        (1.0, None),
        (np.nan, "error is nan; a scale is positive and finite"),
        (np.inf, "error is inf; a scale is positive and finite"),
        (0.0, "error is 0; a scale is positive and finite"),
        (-2.0, "error is -2; a scale is positive and finite"),
        (1e-30, None),
        (LARGEST * 0.9999, None),
        (LARGEST * 1.0001, "warning is 24.3715: weights up to 6.55e+04 could be meant; is it the reciprocal?"),
    ],
)
def test_scales_that_are_none(tmp_path: Path, scale: float, told: str | None) -> None:
    made = opened(tmp_path / "a", modelopt("a", scale) | modelopt("b", 1, scale) | mxfp4("c"))
    level, _, text = (told or "").partition(" ")
    expected = [] if told is None else [f"{level} [scalar] a.weight_scale_2: {text}"]
    expected += [f"error [scalar] b.input_scale: {text}"] if level == "error" else []
    assert lines(scalar_problems(made.path, read_contents(made))) == expected
    divided = opened(tmp_path / "b", compressed("a", 1 / scale if scale else 0))
    said = lines(scalar_problems(divided.path, read_contents(divided)))
    assert [line.partition(" ")[0] for line in said] == ([] if told is None else [level])


def test_scales_of_other_dtypes_are_left_to_other_checks(tmp_path: Path) -> None:
    tensors = modelopt("a") | {"a.weight_scale_2": np.asarray(np.int64(-1))}
    made = opened(tmp_path, tensors)
    assert lines(scalar_problems(made.path, read_contents(made))) == []
