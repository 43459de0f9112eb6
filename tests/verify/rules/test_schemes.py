"""Configs of both layouts against the tensors: each wrong value is an error; configs of other writers are clean."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfbyte.verify import Report, verify
from halfbyte.verify.rules.groups import group_of, read_groups
from halfbyte.verify.rules.schemes import _wanted
from tests.quantized import Layout, edit, load, write_quantized
from tests.tiny_models import BF16, E4M3, Tensors

CONFIG, NESTED = "config.json", "hf_quant_config.json"
LAYER = "model.layers.1"


def errors(report: Report) -> list[tuple[str, str]]:
    return [(problem.rule, problem.name) for problem in report.problems if problem.level == "error"]


def warnings(report: Report) -> list[tuple[str, str]]:
    return [(problem.rule, problem.name) for problem in report.problems if problem.level == "warning"]


def change(path: Path, keys: str, value: object, file: str = CONFIG) -> None:
    """Set one value of a JSON file, by its dotted path; `...` removes it."""
    content = json.loads((path / file).read_text())
    place: Any = content
    *parents, last = keys.split("/")
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    (path / file).write_text(json.dumps(content))


def fp8(rows: int, columns: int, scales: tuple[int, ...] = (), seed: int = 0) -> tuple[np.ndarray[Any, Any], ...]:
    """An FP8 weight with its scales, which are powers of two."""
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(E4M3)
    return values, np.full(scales, 0.125, np.float32)


def with_fp8(path: Path, suffix: str, scales: tuple[int, ...] = ()) -> list[str]:
    """Replace the output projections of attention by FP8."""
    stored, dropped, modules = {}, [], []
    for name in list(load(path)):
        module, _, part = name.rpartition(".")
        if module.endswith("self_attn.o_proj"):
            dropped.append(name)
            if part == "weight_scale":
                modules.append(module)
    for module in modules:
        stored[f"{module}.weight"], stored[f"{module}{suffix}"] = fp8(128, 128, scales)
        stored[f"{module}.input_scale"] = np.asarray(np.float32(1))
    edit(path, stored, tuple(name for name in dropped if name not in stored))
    return modules


# --- compressed-tensors ---

GROUP = "quantization_config/config_groups/group_0"


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("weights/group_size", 64),
        ("weights/num_bits", 8),
        ("weights/type", "int"),
        ("weights/strategy", "channel"),
        ("weights/symmetric", False),
        ("weights/dynamic", True),
        ("weights/group_size", ...),
        ("format", "pack-quantized"),
    ],
)
def test_a_wrong_scheme(tmp_path: Path, format: Any, key: str, value: object) -> None:
    path = write_quantized(tmp_path / "q", "llama", "compressed-tensors", format)
    change(path, f"{GROUP}/{key}", value)
    report = verify(path)
    assert ("scheme", CONFIG) in errors(report)
    said = next(problem.text for problem in report.problems if problem.rule == "scheme")
    assert f"config_groups.group_0.{key.replace('/', '.')} is {None if value is ... else value!r}, but" in said


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("quantization_status", "frozen"),
        ("quantization_status", ...),
        ("format", "float-quantized"),
        ("format", ...),
        ("config_groups/group_0/input_activations", {"num_bits": 8, "type": "float", "strategy": "token"}),
    ],
)
def test_a_wrong_value_of_the_whole(tmp_path: Path, key: str, value: object) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    change(path, f"quantization_config/{key}", value)
    assert ("scheme", CONFIG) in errors(verify(path))


def test_targets_that_leave_modules_out(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    change(path, f"{GROUP}/targets", [r"re:.*self_attn\..*", f"{LAYER}.mlp.up_proj", f"{LAYER}.mlp.nothing"])
    report = verify(path)
    left_out = [name for rule, name in errors(report) if rule == "targets"]
    assert len(left_out) == 5
    assert f"{LAYER}.mlp.gate_proj" in left_out
    assert f"{LAYER}.mlp.up_proj" not in left_out
    assert warnings(report) == [("targets", CONFIG)]


def test_regular_expressions_as_targets_are_clean(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    change(path, f"{GROUP}/targets", [r"re:.*self_attn\.(q|k|v|o)_proj$", r"re:.*mlp.*"])
    change(path, "quantization_config/ignore", [])
    assert verify(path).problems == []


def test_a_plain_layer_that_targets_match(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    change(path, f"{GROUP}/targets", ["re:.*"])
    change(path, "quantization_config/ignore", [])
    assert ("not-excluded", "lm_head") in errors(verify(path))


def llm_compressor(path: Path) -> dict[str, Any]:
    """The config with all that llm-compressor writes into it."""
    args: dict[str, Any] = {
        "actorder": None, "block_structure": None, "observer_kwargs": {}, "scale_dtype": "torch.float8_e4m3fn",
        "zp_dtype": "torch.float8_e4m3fn", "num_bits": 4, "type": "float", "strategy": "tensor_group",
        "group_size": 16, "symmetric": True,
    }  # fmt: skip
    given = json.loads((path / CONFIG).read_text())["quantization_config"]
    return {
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": {**args, "dynamic": "local", "observer": "static_minmax"},
                "output_activations": None,
                "targets": ["Linear"],
                "weights": {**args, "dynamic": False, "observer": "memoryless_minmax"},
            }
        },
        "format": "nvfp4-pack-quantized",
        "global_compression_ratio": None,
        "ignore": given["ignore"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.20.0",
    }


def test_a_config_of_llm_compressor_is_clean(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors", activations=True)
    change(path, "quantization_config", llm_compressor(path))
    assert verify(path).problems == []


def test_fp8_beside_nvfp4_in_groups_is_clean(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors", activations=True)
    with_fp8(path, ".weight_scale", (128, 1))
    config = llm_compressor(path)
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    config["config_groups"]["group_1"] = {
        "format": "float-quantized",
        "targets": [r"re:.*o_proj$"],
        "weights": weights,
        "input_activations": {**weights, "strategy": "token", "dynamic": True},
    }
    config["format"] = "mixed-precision"
    change(path, "quantization_config", config)
    assert verify(path).problems == []
    config["config_groups"]["group_1"]["weights"]["strategy"] = "tensor"
    change(path, "quantization_config", config)
    assert errors(verify(path)) == [("scheme", CONFIG)]


def test_configs_are_read_as_compressed_tensors_reads_them(tmp_path: Path) -> None:
    """The package takes the configs that are clean here, and matches the same modules by name and expression."""
    quantization = importlib.import_module("compressed_tensors.quantization")
    from compressed_tensors.utils.match import match_name

    config = llm_compressor(write_quantized(tmp_path / "q", layout="compressed-tensors", activations=True))
    parsed = quantization.QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    assert (scheme.weights.group_size, scheme.weights.strategy) == (16, "tensor_group")
    for target in (r"re:.*o_proj$", "re:model", "re:o_proj", f"{LAYER}.self_attn.o_proj", "o_proj"):
        for module in (f"{LAYER}.self_attn.o_proj", f"{LAYER}.mlp.down_proj", "o_proj"):
            groups = read_groups({"config_groups": {"g": {"targets": [target], "weights": {}}}})
            assert (group_of(module, groups) is not None) == match_name(module, target)


# --- Model-Optimizer ---


def model_optimizer() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """The package's own way from hf_quant_config.json to config.json, from the one file that has it."""
    package = importlib.util.find_spec("modelopt")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'modelopt'", name="modelopt")
    file = Path(package.submodule_search_locations[0]) / "torch" / "export" / "convert_hf_config.py"
    spec = importlib.util.spec_from_file_location("convert_hf_config", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    convert: Callable[[dict[str, Any]], dict[str, Any]] = module.convert_hf_quant_config_format
    return convert


@pytest.mark.parametrize("file", [CONFIG, NESTED])
@pytest.mark.parametrize("value", ["FP8", "W4A16_AWQ", "", None])
def test_a_wrong_algorithm(tmp_path: Path, file: str, value: object) -> None:
    path = write_quantized(tmp_path / "q")
    change(path, ("quantization_config" if file == CONFIG else "quantization") + "/quant_algo", value, file)
    report = verify(path)
    assert ("scheme", file) in errors(report)
    assert ("config", NESTED) in errors(report)


def test_a_wrong_group_size(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    change(path, "quantization/group_size", 32, NESTED)
    assert errors(verify(path)) == [("scheme", NESTED)]


@pytest.mark.parametrize(("key", "value"), [("num_bits", 8), ("type", "int"), ("group_size", 128)])
def test_wrong_groups_of_model_optimizer(tmp_path: Path, key: str, value: object) -> None:
    path = write_quantized(tmp_path / "q")
    group = {"targets": ["Linear"], "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}}
    edit(path, config_groups={"group_0": group})
    assert verify(path).clean
    change(path, f"{GROUP}/weights/{key}", value)
    assert errors(verify(path)) == [("scheme", CONFIG)]


def test_activations_of_groups_against_the_algorithm(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    edit(path, config_groups={"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": scheme}})
    assert errors(verify(path)) == [("scheme", CONFIG)]


def test_a_config_of_model_optimizer_is_clean(tmp_path: Path) -> None:
    """Converted by the package from its own other form, wildcards included."""
    convert = model_optimizer()
    path = write_quantized(tmp_path / "q", activations=True)
    nested = json.loads((path / NESTED).read_text())
    module = f"{LAYER}.self_attn"
    stored: Tensors = {}
    dropped = [name for name in load(path) if (name.startswith(f"{module}.") and "weight" in name) or module in name]
    for leaf, rows in (("q_proj", 128), ("k_proj", 64), ("v_proj", 64), ("o_proj", 128)):
        stored[f"{module}.{leaf}.weight"] = np.ones((rows, 128), BF16)
    edit(path, stored, tuple(name for name in dropped if name not in stored))
    nested["quantization"]["exclude_modules"] = ["lm_head", f"{module}*"]
    nested["quantization"]["kv_cache_quant_algo"] = "FP8"
    (path / NESTED).write_text(json.dumps(nested))
    change(path, "quantization_config", convert(nested))
    assert verify(path).problems == []


def test_mixed_precision_of_model_optimizer(tmp_path: Path) -> None:
    convert = model_optimizer()
    path = write_quantized(tmp_path / "q", activations=True)
    eights = with_fp8(path, ".weight_scale")
    tensors = load(path)
    fours = sorted(name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2"))
    layers: dict[str, dict[str, object]] = {module: {"quant_algo": "NVFP4", "group_size": 16} for module in fours}
    layers |= {module: {"quant_algo": "FP8"} for module in eights}
    nested = json.loads((path / NESTED).read_text())
    nested["quantization"] |= {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    (path / NESTED).write_text(json.dumps(nested))
    change(path, "quantization_config", convert(nested))
    assert verify(path).problems == []
    change(path, f"quantization_config/quantized_layers/{eights[0]}/quant_algo", "NVFP4")
    change(path, f"quantization_config/quantized_layers/{fours[0]}/group_size", 32)
    assert errors(verify(path)) == [("scheme", CONFIG)] * 2


def test_a_pure_fp8_checkpoint_of_model_optimizer_is_clean(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q")
    stored: Tensors = {}
    dropped = []
    for name, values in load(path).items():
        if name.endswith(".weight_scale_2"):
            module = name.removesuffix(".weight_scale_2")
            rows, packed = load(path)[f"{module}.weight"].shape
            stored[f"{module}.weight"], stored[f"{module}.weight_scale"] = fp8(rows, 2 * packed)
            stored[f"{module}.input_scale"] = np.asarray(np.float32(1))
            dropped.append(name)
        assert values.size
    edit(path, stored, tuple(dropped))
    change(path, "quantization_config/quant_algo", "FP8")
    change(path, "quantization/quant_algo", "FP8", NESTED)
    change(path, "quantization/group_size", None, NESTED)
    assert verify(path).problems == []


# --- the cache ---


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_scales_of_the_cache(tmp_path: Path, layout: Layout) -> None:
    """Each layout has its names; both are clean with a scheme, and a warning without one."""
    path = write_quantized(tmp_path / "q", layout=layout)
    inner = {"modelopt": ("k_proj.k_scale", "v_proj.v_scale"), "compressed-tensors": ("k_scale", "v_scale")}[layout]
    one = np.asarray(np.float32(0.5)) if layout == "modelopt" else np.full(1, 0.5, np.float32)
    edit(path, {f"model.layers.{layer}.self_attn.{name}": one for layer in range(2) for name in inner})
    assert [rule for rule, _ in warnings(verify(path))] == ["cache"]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    edit(path, kv_cache_scheme=scheme)
    if layout == "modelopt":
        assert errors(verify(path)) == [("config", NESTED)]
        change(path, "quantization/kv_cache_quant_algo", "FP8", NESTED)
    assert verify(path).problems == []


def test_a_cache_that_no_server_knows(tmp_path: Path) -> None:
    path = write_quantized(tmp_path / "q", layout="compressed-tensors")
    edit(path, kv_cache_scheme={"num_bits": 4, "type": "int"})
    assert errors(verify(path)) == [("cache", CONFIG)]


@pytest.mark.parametrize(
    ("targets", "weights", "attention"),
    [
        (["LlamaAttention"], {"num_bits": 8}, True),
        (["Linear"], None, True),
        (["Linear"], {"num_bits": 4}, False),
        (["LlamaAttention", "Linear"], {"num_bits": 4}, False),
        (["Linear", "LlamaAttention"], {"num_bits": 4}, False),
        ([], {"num_bits": 4}, False),
    ],
)
def test_groups_of_keys_and_values(targets: list[str], weights: dict[str, int] | None, attention: bool) -> None:
    (group,) = read_groups({"config_groups": {"g": {"targets": targets, "weights": weights}}})
    assert group.is_attention is attention


@pytest.mark.parametrize(
    ("shape", "rows", "strategy"),
    [((), 4, "tensor"), ((1,), 4, "tensor"), ((2,), 2, "channel"), ((4, 1), 4, "channel"), ((1, 1), 1, "tensor"),
     ((2, 3), 8, "block"), ((1, 2), 1, "block")],
)  # fmt: skip
def test_the_strategy_of_fp8_follows_from_its_scales(shape: tuple[int, ...], rows: int, strategy: str) -> None:
    storage = SimpleNamespace(format="fp8", sizes=lambda shape: (0, rows, 64))
    weight: Any = SimpleNamespace(storage=storage, codes=SimpleNamespace(shape=(rows, 64)))
    weight.parts = {"scales": SimpleNamespace(shape=shape)}
    assert _wanted(weight)["strategy"] == strategy
