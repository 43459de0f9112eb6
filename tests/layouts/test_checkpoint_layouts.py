"""The layouts of checkpoints: names, dtypes, shapes and what the config files say, literally."""

from __future__ import annotations

import ast
import json
import subprocess
import sys

import pytest

from halfbyte import layouts
from halfbyte.errors import UnknownNameError, UnsupportedError
from halfbyte.formats import get_format
from halfbyte.layouts import LAYOUTS, get_layout
from halfbyte.layouts.description import Activations, LogicalWeight, Setting

NVFP4, MXFP4 = get_format("nvfp4"), get_format("mxfp4")


def parts(
    layout: str, weight: LogicalWeight, format: str = "nvfp4", activations: Activations = "none"
) -> list[tuple[object, ...]]:
    found = get_layout(layout).parts(weight, get_format(format), activations)
    return [(part.name, part.dtype, part.shape, part.role) for part in found]


def test_modelopt_tensors() -> None:
    assert parts("modelopt", LogicalWeight("m", 128, 64), activations="static") == [
        ("m.weight", "U8", (128, 32), "codes"),
        ("m.weight_scale", "F8_E4M3", (128, 4), "scales"),
        ("m.weight_scale_2", "F32", (), "multiplier"),
        ("m.input_scale", "F32", (), "input_multiplier"),
    ]
    assert len(parts("modelopt", LogicalWeight("m", 128, 64))) == 3


def test_modelopt_stacks() -> None:
    assert parts("modelopt", LogicalWeight("experts.down_proj", 128, 64, 8), activations="static") == [
        ("experts.down_proj", "U8", (8, 32, 128), "codes"),
        ("experts.down_proj_weight_scale", "F8_E4M3", (8, 4, 128), "scales"),
        ("experts.down_proj_weight_scale_2", "F32", (), "multiplier"),
        ("experts.down_proj_input_scale", "F32", (), "input_multiplier"),
    ]


def test_compressed_tensors() -> None:
    assert parts("compressed-tensors", LogicalWeight("m", 128, 64), activations="static") == [
        ("m.weight_packed", "U8", (128, 32), "codes"),
        ("m.weight_scale", "F8_E4M3", (128, 4), "scales"),
        ("m.weight_global_scale", "F32", (1,), "divisor"),
        ("m.input_global_scale", "F32", (1,), "input_divisor"),
    ]
    assert parts("compressed-tensors", LogicalWeight("m", 128, 64), "mxfp4", "static") == [
        ("m.weight_packed", "U8", (128, 32), "codes"),
        ("m.weight_scale", "U8", (128, 2), "scales"),
    ]
    with pytest.raises(UnsupportedError, match="has no stacked experts"):
        parts("compressed-tensors", LogicalWeight("m", 128, 64, 8))


def test_gpt_oss() -> None:
    assert parts("gpt-oss", LogicalWeight("experts.gate_up_proj", 128, 64, 8), "mxfp4") == [
        ("experts.gate_up_proj_blocks", "U8", (8, 128, 2, 16), "codes"),
        ("experts.gate_up_proj_scales", "U8", (8, 128, 2), "scales"),
    ]
    with pytest.raises(UnsupportedError, match="holds stacked experts only"):
        parts("gpt-oss", LogicalWeight("m", 128, 64), "mxfp4")


def setting(format: str = "nvfp4", activations: Activations = "none") -> Setting:
    return Setting(get_format(format), activations, ["a.up_proj"], ["lm_head"], {"quant_method": "fp8"})


def test_modelopt_configs() -> None:
    scheme = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    producer = {"name": "modelopt", "version": "0.47.0"}
    layout = get_layout("modelopt")
    assert layout.quantization_config(setting(activations="static")) == {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": scheme, "input_activations": scheme}},
        "ignore": ["lm_head"],
        "producer": producer,
    }
    weights_alone = layout.quantization_config(setting())
    assert weights_alone["quant_algo"] == "W4A16_NVFP4"
    assert "input_activations" not in weights_alone["config_groups"]["group_0"]
    assert layout.extra_files(setting()) == {
        "hf_quant_config.json": {
            "producer": producer,
            "quantization": {
                "quant_algo": "W4A16_NVFP4",
                "kv_cache_quant_algo": None,
                "group_size": 16,
                "exclude_modules": ["lm_head"],
            },
        }
    }


def test_compressed_tensors_configs() -> None:
    layout = get_layout("compressed-tensors")
    config = layout.quantization_config(setting(activations="static"))
    group = config["config_groups"]["group_0"]
    assert (config["quant_method"], config["format"]) == ("compressed-tensors", "nvfp4-pack-quantized")
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("tensor_group", 16)
    assert (group["input_activations"]["dynamic"], group["input_activations"]["observer"]) == ("local", "static_minmax")
    assert layout.quantization_config(setting())["config_groups"]["group_0"]["input_activations"] is None
    mx = layout.quantization_config(setting("mxfp4", "static"))
    group = mx["config_groups"]["group_0"]
    assert (mx["format"], group["weights"]["strategy"], group["weights"]["group_size"]) == (
        "mxfp4-pack-quantized", "group", 32,
    )  # fmt: skip
    assert group["weights"]["scale_dtype"] == "torch.uint8"
    assert group["input_activations"]["dynamic"] is True
    assert layout.extra_files(setting()) == {}


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("activations", ["none", "static"])
def test_the_whole_config_of_compressed_tensors(format: str, activations: Activations) -> None:
    nv = format == "nvfp4"
    scheme = {"num_bits": 4, "type": "float", "strategy": "tensor_group" if nv else "group"}
    scheme |= {"group_size": 16 if nv else 32, "symmetric": True, "dynamic": False}
    scheme |= dict.fromkeys(("scale_dtype", "zp_dtype"), "torch.float8_e4m3fn" if nv else "torch.uint8")
    inputs = scheme | ({"dynamic": "local", "observer": "static_minmax"} if nv else {"dynamic": True})
    group: dict[str, object] = {"targets": ["Linear"], "format": f"{format}-pack-quantized", "weights": scheme}
    group |= {"input_activations": inputs if activations == "static" else None, "output_activations": None}
    assert get_layout("compressed-tensors").quantization_config(setting(format, activations)) == {
        "quant_method": "compressed-tensors",
        "format": f"{format}-pack-quantized",
        "quantization_status": "compressed",
        "global_compression_ratio": None,
        "kv_cache_scheme": None,
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
        "version": "0.20.0",
    }


def test_a_cache_scheme_of_the_same_layout_is_kept() -> None:
    """It may have one scale per head; one without a strategy is another layout's."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "attn_head"}
    layout = get_layout("compressed-tensors")
    for own, kept in ((scheme, True), ({"num_bits": 8, "type": "float"}, False)):
        wanted = Setting(NVFP4, "none", ["a"], [], {"kv_cache_scheme": own})
        assert (layout.quantization_config(wanted)["kv_cache_scheme"] == own) is kept


def test_layouts_that_are_only_read() -> None:
    with pytest.raises(UnsupportedError, match=r"^layout quark is read and never written$"):
        LAYOUTS["quark"].quantization_config(setting())
    assert sorted(layouts.writable_layouts()) == ["compressed-tensors", "deepseek-v4", "gpt-oss", "modelopt"]


def test_compressed_tensors_reads_its_config() -> None:
    """The peer's own parser takes it, and finds the schemes that were meant."""
    from compressed_tensors.quantization import QuantizationConfig

    for format, activations in (("nvfp4", "none"), ("nvfp4", "static"), ("mxfp4", "none"), ("mxfp4", "static")):
        wanted = setting(format, "static" if activations == "static" else "none")
        parsed = QuantizationConfig.model_validate(get_layout("compressed-tensors").quantization_config(wanted))
        group = parsed.config_groups["group_0"]
        assert (group.weights.num_bits, group.weights.group_size) == (4, wanted.format.block)
        assert (group.input_activations is None) == (activations == "none")


@pytest.mark.parametrize(
    ("source", "cached"),
    [
        ({"kv_cache_quant_algo": "FP8"}, True),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}}, True),
        ({"kv_cache_scheme": None, "kv_cache_quant_algo": None}, False),
        ({"kv_cache_quant_algo": "NVFP4"}, False),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 4, "type": "float"}}, False),
        ({"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "int"}}, False),
    ],
)
def test_an_fp8_cache_is_asked_for_again(source: dict[str, object], cached: bool) -> None:
    wanted = Setting(NVFP4, "none", ["a"], [], source)
    modelopt = get_layout("modelopt")
    eight_bits = {"dynamic": False, "num_bits": 8, "type": "float"}
    assert modelopt.quantization_config(wanted).get("kv_cache_scheme") == (eight_bits if cached else None)
    nested = modelopt.extra_files(wanted)["hf_quant_config.json"]["quantization"]
    assert nested["kv_cache_quant_algo"] == ("FP8" if cached else None)
    scheme = get_layout("compressed-tensors").quantization_config(wanted)["kv_cache_scheme"]
    assert scheme == (eight_bits | {"strategy": "tensor", "symmetric": True} if cached else None)


def test_deepseek_v4_builds_on_the_source() -> None:
    config = get_layout("deepseek-v4").quantization_config(setting(activations="static"))
    assert config["quant_method"] == "fp8"
    assert config["moe_quant_algo"] == "NVFP4"
    assert config["quantized_layers"] == {"a.up_proj": {"quant_algo": "NVFP4", "group_size": 16}}


def test_configs_are_json() -> None:
    for layout in LAYOUTS.values():
        for format in layout.formats:
            config = layout.quantization_config(setting(format))
            assert json.loads(json.dumps(config)) == config


def test_unknown_layouts_list_the_known() -> None:
    with pytest.raises(UnknownNameError, match="unknown layout 'awq'; known: compressed-tensors, deepseek-v4, gpt-oss"):
        get_layout("awq")


def test_the_config_of_gpt_oss_speaks_of_weights_only() -> None:
    claim = get_layout("gpt-oss").read_config({"quant_method": "mxfp4"})
    assert claim is not None
    assert (claim.layout, claim.activations, claim.formats) == ("gpt-oss", False, ("mxfp4",))


def test_modules_and_readers_are_found_by_attribute() -> None:
    script = "import halfbyte as hb; print([getattr(hb.layouts, name).__name__ for name in %r])"
    names = ["gguf", "readers", "storage", "swizzle", "from_modelopt"]
    done = subprocess.run([sys.executable, "-c", script % names], capture_output=True, text=True, check=True)
    assert ast.literal_eval(done.stdout) == [*(f"halfbyte.layouts.{name}" for name in names[:-1]), names[-1]]
    with pytest.raises(AttributeError, match="has no attribute 'nowhere'"):
        layouts.nowhere  # noqa: B018
