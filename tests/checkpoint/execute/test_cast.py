"""`convert` casts MXFP4 as `hb.cast` does: the same bytes for any spread, layout, chunk size and number of workers."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.errors import CheckpointError
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source
from tests.checkpoint.toy import random, read_checkpoint, write_checkpoint
from tests.samples import codes_of, e2m1, float8

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


# --- convert and hb.cast, byte for byte ---


def wanted_tensors(modules: dict[str, hb.QuantizedTensor], layout: str) -> tuple[dict[str, Array], dict[str, int]]:
    """What `hb.cast` gives for modules that share a scale, as the layout names it; and the blocks that it changes."""
    divides = layout == "compressed-tensors"
    stacked = source(
        np.concatenate([np.asarray(q.scales) for q in modules.values()]).astype(int) - 127,
        np.concatenate([codes_of(np.asarray(q.codes)) for q in modules.values()]),
    )
    result, report = hb.cast(stacked, "nvfp4", contract="compressed_tensors" if divides else "modelopt")
    before, after = np.asarray(hb.dequantize(stacked)), np.asarray(hb.dequantize(result))
    tensors: dict[str, Array] = {}
    changed = {}
    start = 0
    for module, q in modules.items():
        rows = slice(start, start + len(q.scales))
        start = rows.stop
        tensors[f"{module}.weight_packed" if divides else f"{module}.weight"] = np.asarray(result.codes)[rows]
        tensors[f"{module}.weight_scale"] = np.asarray(result.scales)[rows]
        word = np.asarray(result.stored_scale)
        tensors[f"{module}.weight_global_scale" if divides else f"{module}.weight_scale_2"] = (
            word.reshape(1) if divides else word
        )
        blocks = (before != after)[rows].reshape(-1, 32).any(axis=1)
        if blocks.any():
            changed[module] = int(blocks.sum())
    assert sum(changed.values()) == report.requantized
    return tensors, changed


def assert_converted(folder: Path, groups: list[dict[str, hb.QuantizedTensor]], layout: str, work: Resources) -> None:
    """Convert groups of modules that share a scale; every tensor and count is what `hb.cast` gives."""
    everything = {module: q for group in groups for module, q in group.items()}
    made_of = checkpoint(folder / "s", everything, shards=min(3, 2 * len(everything)))
    run(make_plan(made_of, Options(layout=layout)), folder / "d", work)
    made = read_checkpoint(folder / "d")
    changed: dict[str, int] = {}
    for group in groups:
        tensors, found = wanted_tensors(group, layout)
        changed |= found
        for name, expected in tensors.items():
            assert_same_bits(made[name], expected)
    assert json.loads((folder / "d" / "halfbyte.json").read_text())["changed_blocks"] == changed


def pair(seed: int, spread: int, rows: int = 24) -> dict[str, hb.QuantizedTensor]:
    """Gate and up, whose exponents together have that spread."""
    rng = np.random.default_rng([seed, spread])
    at = f"model.layers.{seed}.mlp"
    lower = int(rng.integers(0, spread + 1))
    return {
        f"{at}.gate_proj": random_source(rng, lower, (rows, 96), top=int(rng.integers(-9, 9))),
        f"{at}.up_proj": random_source(rng, spread, (rows, 96), top=0),
    }


@pytest.mark.parametrize("spread", range(0, 41))
def test_convert_is_cast_on_every_spread(tmp_path: Path, spread: int) -> None:
    """A partner in another file; pieces of a few rows, two workers; both layouts in turn."""
    layout = ("modelopt", "compressed-tensors")[spread % 2]
    assert_converted(tmp_path, [pair(1, spread)], layout, Resources(workers=2, sync=False, chunk=500))


@given(st.integers(0, 1000), st.integers(14, 40), st.integers(60, 4000), st.integers(1, 3), st.booleans())
@settings(max_examples=8, deadline=None)
def test_pieces_and_workers_change_nothing(seed: int, spread: int, chunk: int, workers: int, divides: bool) -> None:
    groups = [pair(seed, spread), {DOWN: random_source(np.random.default_rng(seed), 18, (7, 64))}]
    layout = "compressed-tensors" if divides else "modelopt"
    with tempfile.TemporaryDirectory() as folder:
        assert_converted(Path(folder), groups, layout, Resources(workers=workers, sync=False, chunk=chunk))


@pytest.mark.parametrize("spread", [6, 19])
def test_stacked_experts_are_cast_as_one_tensor(tmp_path: Path, spread: int) -> None:
    """gpt-oss in Model-Optimizer's layout: one scale for all experts, every matrix transposed."""
    at = "model.layers.0.mlp.experts"
    q = random_source(np.random.default_rng(spread), spread, (4, 128, 64))
    tensors = {
        f"{at}.gate_up_proj_blocks": np.asarray(q.codes).reshape(4, 128, 2, 16),
        f"{at}.gate_up_proj_scales": np.asarray(q.scales),
    }
    config = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 64}
    made_of = write_checkpoint(tmp_path / "s", tensors, config)
    run(make_plan(made_of, Options()), tmp_path / "d", Resources(workers=2, sync=False, chunk=2000))
    made = read_checkpoint(tmp_path / "d")
    result, report = hb.cast(q, "nvfp4", contract="modelopt")
    assert_same_bits(made[f"{at}.gate_up_proj"], np.ascontiguousarray(np.asarray(result.codes).swapaxes(1, 2)))
    scales = np.ascontiguousarray(np.asarray(result.scales).swapaxes(1, 2))
    assert_same_bits(made[f"{at}.gate_up_proj_weight_scale"], scales)
    assert_same_bits(made[f"{at}.gate_up_proj_weight_scale_2"], np.asarray(result.stored_scale))
    changed = json.loads((tmp_path / "d" / "halfbyte.json").read_text())["changed_blocks"]
    assert changed == ({f"{at}.gate_up_proj": report.requantized} if spread > 17 else {})


@pytest.mark.parametrize("spread", [6, 19])
def test_experts_taken_apart_share_with_their_partner(tmp_path: Path, spread: int) -> None:
    """gpt-oss in compressed-tensors: gate and up of one expert are the even and odd rows of one matrix."""
    at = "model.layers.0.mlp.experts"
    q = random_source(np.random.default_rng(spread), spread, (2, 64, 64))
    tensors = {
        f"{at}.gate_up_proj_blocks": np.asarray(q.codes).reshape(2, 64, 2, 16),
        f"{at}.gate_up_proj_scales": np.asarray(q.scales),
    }
    config = {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32}
    made_of = write_checkpoint(tmp_path / "s", tensors, config)
    plan = make_plan(made_of, Options(layout="compressed-tensors"))
    run(plan, tmp_path / "d", Resources(workers=2, sync=False, chunk=700))
    made = read_checkpoint(tmp_path / "d")
    for expert in range(2):
        codes, scales = np.asarray(q.codes)[expert], np.asarray(q.scales)[expert]
        parts = {
            f"{at}.{expert}.{name}": dataclasses.replace(
                q, shape=(32, 64), codes=np.ascontiguousarray(codes[first::2]), scales=scales[first::2].copy()
            )
            for first, name in enumerate(("gate_proj", "up_proj"))
        }
        for name, expected in wanted_tensors(parts, "compressed-tensors")[0].items():
            assert_same_bits(made[name], expected)


def test_partners_given_as_a_list_are_cast_alike() -> None:
    """The tests above stack partners into one tensor; `hb.cast` of a list gives the same bytes."""
    modules = pair(3, 22)
    stacked, _ = wanted_tensors(modules, "modelopt")
    results, _ = hb.cast(list(modules.values()), "nvfp4", contract="modelopt")
    for module, result in zip(modules, results, strict=True):
        assert_same_bits(result.codes, stacked[f"{module}.weight"])
        assert_same_bits(result.scales, stacked[f"{module}.weight_scale"])
        assert_same_bits(np.asarray(result.stored_scale), stacked[f"{module}.weight_scale_2"])


# --- what is stored, and what is refused ---


@pytest.mark.parametrize(("spread", "code"), [(21, 7), (22, 5), (23, 3), (24, 5)])
def test_a_stored_divisor_decodes_to_what_was_measured(tmp_path: Path, spread: int, code: int) -> None:
    """One outlier far above the rest asks for a scale that is no power of two; readers of this layout divide by it.

    The best multiplier, inverted, is another divisor than the best divisor: it has to be chosen as it is stored.
    """
    rng = np.random.default_rng([code - 1, spread])
    exponents, codes = rng.integers(-spread, 2 - spread, (32, 4)), rng.integers(0, 16, (32, 128))
    exponents[0, 0], codes[0, :32] = 0, 0
    codes[0, 0] = code
    q = source(exponents, codes)
    plan = make_plan(checkpoint(tmp_path / "s", {DOWN: q}), Options(layout="compressed-tensors"))
    run(plan, tmp_path / "d", Resources(workers=1, sync=False))
    made = read_checkpoint(tmp_path / "d")
    divisor = made[f"{DOWN}.weight_global_scale"]
    bytes_, scales = made[f"{DOWN}.weight_packed"], float8(made[f"{DOWN}.weight_scale"].view(np.uint8), "e4m3")
    values = e2m1(codes_of(bytes_)) * np.repeat((scales / divisor).astype(np.float32), 16, axis=1)
    result, report = hb.cast(q, "nvfp4", contract="compressed_tensors")
    error = float(((values.astype(np.float64) - np.asarray(hb.dequantize(q), np.float64)) ** 2).sum())
    assert error == pytest.approx(report.squared_error, rel=1e-12)
    assert_same_bits(divisor, np.asarray(result.stored_scale).reshape(1))
    multiplier = np.asarray(hb.cast(q, "nvfp4", contract="modelopt")[0].stored_scale)
    assert divisor[0] != np.float32(1) / multiplier
    others = [
        hb.cast(q, "nvfp4", algorithm, contract="compressed_tensors")[1] for algorithm in ("hybrid", "requantize")
    ]
    assert error <= min(other.squared_error for other in others) * (1 + 1e-12)


def test_a_divisor_that_float32_cannot_hold_is_refused(tmp_path: Path) -> None:
    q = source(np.full((1, 1), -127), np.full((1, 32), 7))
    plan = make_plan(checkpoint(tmp_path / "s", {DOWN: q}), Options(layout="compressed-tensors"))
    with pytest.raises(CheckpointError, match=rf"{DOWN}: contract compressed_tensors stores .* or --keep them"):
        run(plan, tmp_path / "d", Resources(workers=1, sync=False))


def test_partners_of_which_only_one_is_mxfp4_are_refused(tmp_path: Path) -> None:
    """They share a scale that one chooses from exponents and the other from an amax."""
    tensors = {
        "model.layers.0.mlp.gate_proj.weight": random(0, 32, 64, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
        "model.layers.0.mlp.gate_proj.weight_scale": np.ones(1, np.float32),
        "model.layers.0.mlp.up_proj.weight_packed": np.zeros((32, 32), np.uint8),
        "model.layers.0.mlp.up_proj.weight_scale": np.full((32, 2), 120, np.uint8),
    }
    plan = make_plan(write_checkpoint(tmp_path / "s", tensors), Options())
    with pytest.raises(CheckpointError, match="share a tensor scale, but only some are MXFP4; --keep them"):
        run(plan, tmp_path / "d", Resources(workers=1, sync=False))
