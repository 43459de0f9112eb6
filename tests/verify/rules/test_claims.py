"""verify: the claims of configs and of the index, and what the readers of a family can use."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from halfbyte.verify import Report, verify
from tests.clients.converted import converted
from tests.quantized import edit, load, write_quantized
from tests.tiny_models import E4M3, Tensors, make, write_checkpoint

NVFP4, MODELOPT = ("--to", "nvfp4"), ("--layout", "modelopt")


def found(report: Report, level: str, rule: str) -> list[str]:
    return [problem.name for problem in report.problems if (problem.level, problem.rule) == (level, rule)]


def change(path: Path, name: str, **values: object) -> None:
    file = path / name
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_experts_that_a_reader_cannot_use_are_a_warning(tmp_path: Path) -> None:
    compressed = verify(write_quantized(tmp_path / "a", "qwen3_moe", "compressed-tensors"))
    assert (compressed.clean, len(found(compressed, "warning", "reader"))) == (True, 1)
    gpt_oss = verify(converted(tmp_path, "gpt_oss", *NVFP4, *MODELOPT))
    assert (gpt_oss.clean, len(found(gpt_oss, "warning", "reader"))) == (True, 1)
    assert found(verify(write_quantized(tmp_path / "b", "qwen3_moe", "modelopt")), "warning", "reader") == []


def test_gpt_oss_layout_of_another_family(tmp_path: Path) -> None:
    path = make("gpt_oss_mxfp4", tmp_path)
    assert verify(path).clean
    change(path, "config.json", model_type="llama4")
    assert found(verify(path), "error", "reader") == ["config.json"]


def test_weights_that_the_config_does_not_explain(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    stored: Tensors = {}
    for name, values in load(write_quantized(tmp_path / "other")).items():
        if name.startswith("model.layers.1.mlp.down_proj"):
            stored[name] = values
    dropped = [name for name in load(path) if name.startswith("model.layers.1.mlp.down_proj")]
    edit(path, stored, tuple(name for name in dropped if name not in stored))
    assert found(verify(path), "error", "config") == ["model.layers.1.mlp.down_proj"]


def test_deepseek_v4_wants_input_scales(tmp_path: Path) -> None:
    path = converted(tmp_path, "deepseek_v4", *NVFP4, *MODELOPT)
    assert verify(path, tmp_path / "deepseek_v4").clean
    (path / "halfbyte.json").unlink()
    module = "layers.1.ffn.experts.2.w2"
    edit(path, drop=(f"{module}.input_scale",))
    assert found(verify(path), "error", "input-scale") == [module]


def test_layers_that_a_mixed_config_leaves_out(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", activations=True)
    (path / "hf_quant_config.json").unlink()
    modules = sorted(name.removesuffix(".weight_scale") for name in load(path) if name.endswith(".weight_scale"))
    layers = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in modules}
    edit(path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert verify(path).clean
    left_out = layers.pop(modules[3])
    layers["model.layers.7.mlp.up_proj"] = left_out
    edit(path, quantized_layers=layers)
    assert found(verify(path), "error", "not-listed") == [modules[3], "model.layers.7.mlp.up_proj"]


def test_two_quantization_configs(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    change(path, "config.json", text_config={"quantization_config": {"quant_method": "fp8"}})
    assert found(verify(path), "error", "config") == ["config.json"]


def test_a_wrong_total_size_is_a_warning(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    change(path, "model.safetensors.index.json", metadata={"total_size": 1})
    report = verify(path)
    assert (report.clean, found(report, "warning", "index")) == (True, ["model.safetensors.index.json"])


@pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf])
def test_a_scale_that_is_none(tmp_path: Path, value: float) -> None:
    path = write_quantized(tmp_path / "q", activations=True)
    name = "model.layers.0.mlp.down_proj.input_scale"
    edit(path, {name: np.asarray(np.float32(value))})
    assert found(verify(path), "error", "scalar") == [name]


def test_input_scales_of_fp8_weights_are_no_strays(tmp_path: Path) -> None:
    """Fused FP8 weights may have input scales of their own: servers take the largest."""
    tensors: Tensors = {}
    for number, name in enumerate(("gate_proj", "up_proj")):
        module = f"model.layers.0.mlp.{name}"
        tensors[f"{module}.weight"] = np.ones((32, 64), E4M3)
        tensors[f"{module}.weight_scale"] = np.ones((), np.float32)
        tensors[f"{module}.input_scale"] = np.full((), 1 + number, np.float32)
    config: dict[str, object] = {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    path = write_checkpoint(tmp_path / "fp8", tensors, config)
    assert verify(path).problems == []
    assert verify(path).kinds == {"fp8 (weight_scale)": 2}


def test_blocks_without_scales_are_a_weight_that_lacks_a_part(tmp_path: Path) -> None:
    path = make("gpt_oss_mxfp4", tmp_path)
    stack = "model.layers.1.mlp.experts.down_proj"
    edit(path, drop=(f"{stack}_scales",))
    assert found(verify(path), "error", "missing-part") == [stack]
    assert found(verify(path), "error", "stray-tensor") == []


def test_fused_layers_are_those_of_the_model_type(tmp_path: Path) -> None:
    """w1 and w2 are one matrix in Qwen-1, and two in all other models."""
    path = write_checkpoint(
        tmp_path / "q",
        {
            f"h.0.mlp.{leaf}.{part}": values
            for number, leaf in enumerate(("w1", "w2"))
            for part, values in (
                ("weight", np.zeros((16, 32), np.uint8)),
                ("weight_scale", np.ones((16, 4), np.float32).astype(E4M3)),
                ("weight_scale_2", np.asarray(0.01 * (number + 1), np.float32)),
            )
        },
        {"model_type": "qwen", "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}},
        shards=1,
    )
    assert found(verify(path), "error", "shared-scale")
    change(path, "config.json", model_type="other")
    assert not found(verify(path), "error", "shared-scale")
