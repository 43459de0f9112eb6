"""The whole of verify on small checkpoints: what is asked, in which order, and the fields of the report."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.verify import LIMIT, verify
from halfbyte.verify.against.compare import Progress
from tests.samples import f32
from tests.tiny_models import BF16, E4M3, Config, Tensors, write_checkpoint
from tests.verify.headers import lines

MODULE = "model.layers.0.self_attn.o_proj"
SOURCE: Tensors = {f"{MODULE}.weight": np.ones((16, 128), BF16), "n": f32(1, 2)}
ONES: Tensors = {
    f"{MODULE}.weight": np.full((16, 64), 0x22, np.uint8),
    f"{MODULE}.weight_scale": np.ones((16, 8), E4M3),
    f"{MODULE}.weight_scale_2": np.ones((), np.float32),
    "n": f32(1, 2),
}
QUANTIZATION: Config = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}
CONFIG: Config = {"quantization_config": QUANTIZATION}


def write(path: Path, tensors: Tensors, config: Config = CONFIG) -> Path:
    return write_checkpoint(path, tensors, config, shards=1)


def test_the_fields_of_a_report(tmp_path: Path) -> None:
    path, source = write(tmp_path / "q", ONES), write(tmp_path / "s", SOURCE, {})
    alone = verify(path)
    assert (alone.path, alone.against, alone.tensors, alone.bytes) == (str(path), None, 4, 16 * 72 + 4 + 8)
    assert (alone.kinds, alone.problems, alone.errors, alone.equal) == ({"nvfp4 (modelopt)": 1}, [], [], 0)
    steps: list[Progress] = []
    report = verify(path, source, progress=steps.append)
    assert (report.against, report.equal, len(report.errors), report.problems) == (str(source), 1, 1, [])
    assert steps == [Progress(1, 2), Progress(2, 2)]
    assert LIMIT == 0.25


def test_headers_alone(tmp_path: Path) -> None:
    """No block scale is looked at, but the scalars are."""
    scales = np.ones((16, 8), E4M3)
    scales[0, 0] = np.nan
    changed: Tensors = {
        **ONES,
        f"{MODULE}.weight_scale": scales,
        f"{MODULE}.weight_scale_2": np.asarray(np.float32(-1)),
    }
    path = write(tmp_path, changed)
    scalar = f"error [scalar] {MODULE}.weight_scale_2: is -1; a scale is positive and finite"
    block = f"error [block-scale] {MODULE}.weight_scale: 1 of 128 scales are NaN: their blocks decode to NaN"
    assert lines(verify(path, headers_only=True).problems) == [scalar]
    assert lines(verify(path).problems) == [scalar, block]


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_2"])
def test_damaged_weights_are_not_read(tmp_path: Path, part: str) -> None:
    """They are said to be damaged, and neither their scales nor their values are looked at."""
    changed = {**ONES, f"{MODULE}.weight_scale_2": np.asarray(np.float32(-1))}
    changed[f"{MODULE}.{part}"] = np.asarray([1, 2], np.int8)
    report = verify(write(tmp_path / "q", changed), write(tmp_path / "s", SOURCE, {}))
    assert {problem.rule for problem in report.problems} == {"dtype", "shape"}
    assert (report.errors, report.equal) == ([], 1)


def test_every_check_is_asked(tmp_path: Path) -> None:
    """One fault of each kind, in the order in which they are told."""
    other = "model.layers.0.self_attn.q_proj"
    tensors = {**ONES, "s.weight_scale_2": f32(1), f"{MODULE}.k_scale": f32(1)}
    tensors |= {name.replace(MODULE, other): x for name, x in ONES.items() if name != "n"}
    tensors |= {
        f"{other}.weight_scale_2": np.asarray(np.float32(1e9)),
        f"{other[:-6]}k_proj.weight": np.ones((4, 4), BF16),
    }
    tensors["lm_head.weight"] = np.ones((4, 4), BF16)
    tensors |= {name.replace(MODULE, "model.embed_tokens"): x for name, x in ONES.items() if name != "n"}
    config: Config = {"quantization_config": {**QUANTIZATION, "quant_algo": "FP8", "ignore": ["lm_head", "zz"]}}
    report = verify(write(tmp_path / "q", tensors, config), write(tmp_path / "s", SOURCE, {"hidden_size": 3}))
    assert list(dict.fromkeys(problem.rule for problem in report.problems)) == [
        "stray-tensor",
        "role",
        "scheme",
        "cache",
        "not-excluded",
        "idle-entry",
        "scalar",
        "fused-mix",
        "config",
        "no-source",
    ]


def test_schemes_are_those_of_compressed_tensors(tmp_path: Path) -> None:
    packed = {
        name.replace("o_proj.weight", "o_proj.weight_packed") if name.endswith("weight") else name: x
        for name, x in ONES.items()
    }
    packed[f"{MODULE}.weight_global_scale"] = f32(1)
    del packed[f"{MODULE}.weight_scale_2"]
    config: Config = {
        "quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {}}}}
    }
    rules = [problem.rule for problem in verify(write(tmp_path, packed, config)).problems]
    assert "targets" in rules
