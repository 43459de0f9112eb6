"""Every source format: what is decoded, cast, moved to another layout, or left as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.checkpoint import Options, Plan, Resources, Rules, make_plan, run
from halfbyte.errors import CheckpointError
from halfbyte.testing import assert_same_bits
from tests.checkpoint.toy import llama, random, read_checkpoint, write_checkpoint

Array = npt.NDArray[Any]
SMALL = Resources(workers=2, max_memory=1 << 28, sync=False, chunk=5000)
BF16, E4M3, E8M0 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e8m0fnu
DOWN = "model.layers.0.mlp.down_proj"


def convert(source: Path, options: Options) -> tuple[Plan, dict[str, Array]]:
    destination = source.parent / f"out-{options.to}-{options.layout}"
    plan = make_plan(source, options)
    run(plan, destination, SMALL)
    return plan, read_checkpoint(destination)


def fp8(seed: int, rows: int, columns: int) -> Array:
    return random(seed, rows, columns, dtype=np.float32).astype(E4M3)


SCALES: dict[str, tuple[str, Array, tuple[int, int]]] = {
    "deepseek": ("weight_scale_inv", random(1, 2, 3, dtype=np.float32), (128, 128)),
    "deepseek bf16": ("weight_scale_inv", random(1, 2, 3), (128, 128)),
    "ue8m0": ("weight_scale_inv", np.array([[120, 130, 127], [1, 140, 128]], np.uint8).view(E8M0), (128, 128)),
    "ue8m0 as bytes": ("weight_scale_inv", np.array([[120, 130, 127], [125, 140, 128]], np.uint8), (128, 128)),
    "deepseek v4 name": ("scale", np.array([[120, 130, 127], [125, 140, 128]], np.uint8).view(E8M0), (128, 128)),
    "tensor": ("weight_scale", np.array([0.013], np.float32), (200, 272)),
    "scalar": ("weight_scale", np.array(0.013, np.float32), (200, 272)),
    "channel": ("weight_scale", random(2, 200, 1, dtype=np.float32), (1, 272)),
    "channel flat": ("weight_scale", random(2, 200, dtype=np.float32), (1, 272)),
    "block bf16": ("weight_scale", random(3, 2, 3), (128, 128)),
    "modelopt blocks": ("weight_scale", random(3, 2, 1, 3, 1, dtype=np.float32), (128, 128)),
}


def expand(scale: Array, block: tuple[int, int], shape: tuple[int, int]) -> Array:
    """A grid of scales as one scale per element."""
    values = scale.view(np.uint8) if scale.dtype in (E8M0, np.uint8) else scale
    if values.dtype == np.uint8:
        values = np.ldexp(np.float32(1), values.astype(np.int32) - 127)
    grid = values.astype(np.float32).reshape(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    return np.repeat(np.repeat(grid, block[0], 0), block[1], 1)[: shape[0], : shape[1]]


@pytest.mark.parametrize("kind", SCALES)
@pytest.mark.parametrize("chunk", [300, 50_000])
def test_fp8_is_decoded_and_quantized(tmp_path: Path, kind: str, chunk: int) -> None:
    suffix, scale, block = SCALES[kind]
    weight = fp8(0, 200, 272)
    tensors = {f"{DOWN}.weight": weight, f"{DOWN}.{suffix}": scale, f"{DOWN}.input_scale": np.ones((), np.float32)}
    source = write_checkpoint(tmp_path / "s", tensors, {"quantization_config": {"quant_method": "fp8"}}, shards=2)
    values = weight.astype(np.float32) * expand(scale, block, (200, 272))
    plan = make_plan(source, Options(method="amax"))
    run(plan, tmp_path / "d", Resources(workers=2, max_memory=1 << 28, sync=False, chunk=chunk))
    made = read_checkpoint(tmp_path / "d")
    q = hb.quantize(values, "nvfp4", "modelopt", "amax")
    assert_same_bits(made[f"{DOWN}.weight"], q.codes)
    assert_same_bits(made[f"{DOWN}.weight_scale"], q.scales)
    assert set(made) == {f"{DOWN}.weight", f"{DOWN}.weight_scale", f"{DOWN}.weight_scale_2"}
    assert f"{DOWN}.input_scale" in plan.dropped
    run(make_plan(source, Options(to="bf16")), tmp_path / "plain", SMALL)
    assert_same_bits(read_checkpoint(tmp_path / "plain")[f"{DOWN}.weight"], values.astype(BF16))


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_int4_is_decoded_and_quantized(tmp_path: Path, dtype: npt.DTypeLike) -> None:
    generator = np.random.default_rng(0)
    codes = generator.integers(0, 16, (48, 64), dtype=np.int64)
    packed = (codes.reshape(48, 8, 8) << (4 * np.arange(8))).sum(axis=-1).astype(np.uint32).view(np.int32)
    scale = np.abs(random(1, 48, 2, dtype=dtype))
    tensors = {
        f"{DOWN}.weight_packed": packed,
        f"{DOWN}.weight_scale": scale,
        f"{DOWN}.weight_shape": np.array([48, 64]),
    }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
    source = write_checkpoint(tmp_path / "s", tensors, config, shards=3)
    values = (codes - 8).astype(np.float32) * np.repeat(scale.astype(np.float32), 32, axis=1)
    _, made = convert(source, Options(method="amax"))
    assert_same_bits(made[f"{DOWN}.weight"], hb.quantize(values, "nvfp4", "modelopt", "amax").codes)
    assert set(made) == {f"{DOWN}.weight", f"{DOWN}.weight_scale", f"{DOWN}.weight_scale_2"}
    _, plain = convert(source, Options(to="bf16"))
    assert_same_bits(plain[f"{DOWN}.weight"], values.astype(BF16))


@pytest.mark.parametrize(
    ("extra", "scale", "message"),
    [
        ({"weight_zero_point": np.zeros(1, np.int32)}, (48, 2), "INT4 with zero points"),
        ({}, (48, 3), "3 scales per row do not fit 64 elements"),
        ({}, (47, 2), "are no scales of 48 rows"),
    ],
)
def test_int4_that_is_not_read(tmp_path: Path, extra: dict[str, Array], scale: tuple[int, int], message: str) -> None:
    tensors: dict[str, Array] = {f"{DOWN}.weight_packed": np.zeros((48, 8), np.int32)}
    tensors |= {f"{DOWN}.weight_scale": np.ones(scale, np.float32)} | {f"{DOWN}.{name}": x for name, x in extra.items()}
    with pytest.raises(CheckpointError, match=message):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options())


def test_awq_is_refused(tmp_path: Path) -> None:
    tensors = {
        f"{DOWN}.weight": np.zeros((16, 16), np.uint8),
        f"{DOWN}.weight_scale": np.ones((16, 2), E4M3),
        f"{DOWN}.weight_scale_2": np.ones((), np.float32),
        f"{DOWN}.pre_quant_scale": np.ones(32, np.float32),
    }
    with pytest.raises(CheckpointError, match="AWQ's pre_quant_scale"):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options(layout="compressed-tensors"))


def test_kept_fp8_becomes_bf16_and_plain_weights_stay(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {}
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        tensors[f"model.layers.0.{name}.weight"] = fp8(3, 128, 128)
        tensors[f"model.layers.0.{name}.weight_scale_inv"] = np.array([[0.5]], np.float32)
    tensors["model.layers.0.mlp.gate.weight"] = random(1, 8, 128)
    config = {
        "model_type": "deepseek_v3",
        "torch_dtype": "float8",
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    plan, made = convert(write_checkpoint(tmp_path / "s", tensors, config), Options())
    decoded = (tensors["model.layers.0.self_attn.o_proj.weight"].astype(np.float32) * np.float32(0.5)).astype(BF16)
    assert_same_bits(made["model.layers.0.self_attn.o_proj.weight"], decoded)
    assert "model.layers.0.self_attn.o_proj.weight_scale_inv" not in made
    assert plan.kept["model.layers.0.mlp.gate"] == "unquantized in the source"
    assert made["model.layers.0.mlp.down_proj.weight"].dtype == np.uint8
    written = json.loads((tmp_path / "out-nvfp4-modelopt" / "config.json").read_text())
    assert written["torch_dtype"] == "bfloat16"
    assert written["quantization_config"]["quant_method"] == "modelopt"
    assert "model.layers.0.self_attn.o_proj" in written["quantization_config"]["ignore"]


@pytest.mark.parametrize("value", [0x7F, 0xFF])
def test_nan_in_fp8_is_refused(tmp_path: Path, value: int) -> None:
    weight = fp8(0, 200, 272)
    weight.view(np.uint8)[150, 7] = value
    tensors = {f"{DOWN}.weight": weight, f"{DOWN}.weight_scale_inv": np.ones((2, 3), np.float32)}
    with pytest.raises(CheckpointError, match=f"{DOWN} holds NaN"):
        convert(write_checkpoint(tmp_path / "s", tensors), Options())


def test_fp8_without_a_scale_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "s", {f"{DOWN}.weight": fp8(0, 16, 16)})
    with pytest.raises(CheckpointError, match=r"is quantized \(F8_E4M3\), but none of its .*weight_scale_inv"):
        make_plan(source, Options())


def test_fp8_with_scales_that_do_not_fit_is_refused(tmp_path: Path) -> None:
    tensors = {f"{DOWN}.weight": fp8(0, 256, 256), f"{DOWN}.weight_scale_inv": np.ones((5, 2), np.float32)}
    with pytest.raises(CheckpointError, match="5 scales do not fit an axis of 256"):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options())


def mxfp4(seed: int, rows: int, columns: int, spread: int = 6) -> tuple[Array, Array]:
    """Packed codes and E8M0 scales."""
    generator = np.random.default_rng(seed)
    codes = generator.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = generator.integers(120, 120 + spread, (rows, columns // 32), dtype=np.uint8)
    return codes, scales


def as_mxfp4(codes: Array, scales: Array) -> hb.QuantizedTensor:
    shape = (codes.shape[0], codes.shape[1] * 2)
    contract = hb.contracts.get_contract("ocp", hb.get_format("mxfp4"))
    return hb.QuantizedTensor(hb.get_format("mxfp4"), shape, codes, scales, None, None, contract)


@pytest.mark.parametrize("layout", ["modelopt", "compressed-tensors"])
def test_mxfp4_is_cast_as_cast_does_it(tmp_path: Path, layout: str) -> None:
    pair = {"gate_proj": mxfp4(1, 64, 96), "up_proj": mxfp4(2, 64, 96, spread=12)}
    pair["gate_proj"][0][3] = 0  # a row of zero blocks
    tensors: dict[str, Array] = {}
    for name, (codes, scales) in pair.items():
        tensors |= {
            f"model.layers.0.mlp.{name}.weight_packed": codes,
            f"model.layers.0.mlp.{name}.weight_scale": scales,
        }
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    source = write_checkpoint(tmp_path / "s", tensors, config, shards=2)
    _, made = convert(source, Options(layout=layout))
    results, report = hb.cast([as_mxfp4(*parts) for parts in pair.values()], "nvfp4")
    assert report.lossless
    for name, q in zip(pair, results, strict=True):
        at = f"model.layers.0.mlp.{name}"
        assert_same_bits(made[f"{at}.weight" if layout == "modelopt" else f"{at}.weight_packed"], q.codes)
        assert_same_bits(made[f"{at}.weight_scale"], q.scales)
        assert q.global_scale is not None
        multiplier = np.asarray(q.global_scale)
        if layout == "modelopt":
            assert_same_bits(made[f"{at}.weight_scale_2"], multiplier)
        else:
            assert_same_bits(made[f"{at}.weight_global_scale"], (1 / multiplier).reshape(1))


def test_blocks_beyond_the_window_are_counted(tmp_path: Path) -> None:
    codes, scales = mxfp4(1, 16, 64)
    codes[0] = 0x77
    scales[0, 0] = 90  # more than 17 binades below the rest
    tensors = {f"{DOWN}.weight_packed": codes, f"{DOWN}.weight_scale": scales}
    convert(write_checkpoint(tmp_path / "s", tensors), Options())
    manifest = json.loads((tmp_path / "out-nvfp4-modelopt" / "halfbyte.json").read_text())
    assert manifest["changed_blocks"] == {DOWN: 1}


def test_nan_scales_are_refused(tmp_path: Path) -> None:
    codes, scales = mxfp4(1, 16, 64)
    scales[3, 1] = 255
    source = write_checkpoint(tmp_path / "s", {f"{DOWN}.weight_packed": codes, f"{DOWN}.weight_scale": scales})
    with pytest.raises(
        CheckpointError, match=f"{DOWN} has E8M0 scales of 255, which is NaN .1 of 32, the first at row 3, block 1"
    ):
        convert(source, Options())


def test_mxfp4_to_bf16_and_to_its_own_layout(tmp_path: Path) -> None:
    codes, scales = mxfp4(1, 48, 64)
    source = write_checkpoint(tmp_path / "s", {f"{DOWN}.weight_packed": codes, f"{DOWN}.weight_scale": scales})
    _, plain = convert(source, Options(to="bf16"))
    assert_same_bits(plain[f"{DOWN}.weight"], hb.dequantize(as_mxfp4(codes, scales), "bfloat16"))
    _, same = convert(source, Options(to="mxfp4", layout="compressed-tensors"))
    assert_same_bits(same[f"{DOWN}.weight_packed"], codes)
    assert_same_bits(same[f"{DOWN}.weight_scale"], scales)


@pytest.mark.parametrize("activations", [None, "unit", "none"])
def test_nvfp4_changes_its_layout_and_back(tmp_path: Path, activations: str | None) -> None:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    run(make_plan(source, Options(activations=activations)), tmp_path / "m", SMALL)
    run(make_plan(tmp_path / "m", Options(layout="compressed-tensors")), tmp_path / "c", SMALL)
    run(make_plan(tmp_path / "c", Options(layout="modelopt")), tmp_path / "m2", SMALL)
    first, middle, second = (read_checkpoint(tmp_path / name) for name in ("m", "c", "m2"))
    assert set(first) == set(second)
    for name, x in first.items():
        if name.endswith("weight_scale_2"):
            divisor = np.float32(1) / x
            assert_same_bits(middle[name.replace("weight_scale_2", "weight_global_scale")], divisor.reshape(1))
            assert_same_bits(second[name], np.asarray(np.float32(1) / divisor))  # one rounding each way
        else:
            assert_same_bits(second[name], x)
    assert (f"{DOWN}.input_global_scale" in middle) == (activations == "unit")
    plan = make_plan(tmp_path / "m", Options(layout="compressed-tensors"))
    assert {unit.action for unit in plan.units} == {"relayout"}


def test_nvfp4_to_bf16(tmp_path: Path) -> None:
    tensors = llama()
    source = write_checkpoint(tmp_path / "s", tensors)
    run(make_plan(source, Options()), tmp_path / "m", SMALL)
    run(make_plan(tmp_path / "m", Options(to="bf16")), tmp_path / "b", SMALL)
    made = read_checkpoint(tmp_path / "b")
    assert {name: x.shape for name, x in made.items()} == {name: x.shape for name, x in tensors.items()}
    q = hb.quantize(tensors[f"{DOWN}.weight"], "nvfp4", "modelopt", "optimal")
    assert_same_bits(made[f"{DOWN}.weight"], hb.dequantize(q, "bfloat16"))
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    assert "quantization_config" not in config
    assert not (tmp_path / "b" / "hf_quant_config.json").exists()


def test_nvfp4_to_mxfp4_goes_through_its_values(tmp_path: Path) -> None:
    weight = random(0, 32, 64)
    run(make_plan(write_checkpoint(tmp_path / "s", {f"{DOWN}.weight": weight}), Options()), tmp_path / "m", SMALL)
    run(make_plan(tmp_path / "m", Options(to="mxfp4", layout="compressed-tensors")), tmp_path / "x", SMALL)
    values = hb.dequantize(hb.quantize(weight, "nvfp4", "modelopt", "optimal"))
    assert_same_bits(
        read_checkpoint(tmp_path / "x")[f"{DOWN}.weight_packed"], hb.quantize(values, "mxfp4", "ocp").codes
    )


def test_a_plain_source_has_nothing_to_decode(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nothing to convert"):
        make_plan(write_checkpoint(tmp_path / "s", llama()), Options(to="bf16"))


def test_a_quantized_module_that_is_kept_becomes_bf16(tmp_path: Path) -> None:
    run(make_plan(write_checkpoint(tmp_path / "s", llama()), Options()), tmp_path / "m", SMALL)
    options = Options(layout="compressed-tensors", rules=Rules(keep=(DOWN,)))
    run(make_plan(tmp_path / "m", options), tmp_path / "c", SMALL)
    assert read_checkpoint(tmp_path / "c")[f"{DOWN}.weight"].dtype == BF16


@pytest.mark.parametrize("missing", ["weight_scale", "weight_scale_2"])
def test_a_quantized_weight_that_lacks_a_part(tmp_path: Path, missing: str) -> None:
    tensors = {
        f"{DOWN}.weight": np.zeros((16, 16), np.uint8),
        f"{DOWN}.weight_scale": np.ones((16, 2), E4M3),
        f"{DOWN}.weight_scale_2": np.ones((), np.float32),
    }
    del tensors[f"{DOWN}.{missing}"]
    with pytest.raises(CheckpointError, match=f"{missing} is not in the checkpoint"):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options(layout="compressed-tensors"))


def test_scales_of_the_wrong_shape(tmp_path: Path) -> None:
    tensors = {
        f"{DOWN}.weight_packed": np.zeros((16, 16), np.uint8),
        f"{DOWN}.weight_scale": np.zeros((16, 2), np.uint8),
    }
    with pytest.raises(CheckpointError, match=r"needs U8 scales of shape \[16, 1\], got U8 \[16, 2\]"):
        make_plan(write_checkpoint(tmp_path / "s", tensors), Options())


def test_deepseek_v4(tmp_path: Path) -> None:
    tensors: dict[str, Array] = {"embed.weight": random(0, 16, 64), "head.weight": random(1, 16, 64)}
    experts = [f"layers.0.ffn.experts.{e}.{w}" for e in range(2) for w in ("w1", "w2", "w3")]
    parts = {name: mxfp4(number, 64, 64) for number, name in enumerate(experts)}
    for name, (codes, scales) in parts.items():
        tensors |= {f"{name}.weight": codes.view(np.int8), f"{name}.scale": scales.view(E8M0)}
    codes, scales = mxfp4(9, 64, 64)
    tensors |= {"mtp.0.ffn.experts.0.w1.weight": codes.view(np.int8), "mtp.0.ffn.experts.0.w1.scale": scales.view(E8M0)}
    for name in ("layers.0.attn.wq_a", "layers.0.ffn.shared_experts.w1"):
        tensors |= {f"{name}.weight": fp8(4, 128, 128), f"{name}.scale": np.array([[127]], np.uint8).view(E8M0)}
    tensors["layers.0.ffn.gate.weight"] = random(5, 2, 64)
    quantization = {"quant_method": "fp8", "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    config = {"model_type": "deepseek_v4", "expert_dtype": "fp4", "quantization_config": quantization}
    plan, made = convert(write_checkpoint(tmp_path / "s", tensors, config, shards=2), Options())
    for expert in range(2):
        pair = [f"layers.0.ffn.experts.{expert}.{w}" for w in ("w1", "w3")]
        results, _ = hb.cast([as_mxfp4(*parts[name]) for name in pair], "nvfp4")
        for name, q in zip(pair, results, strict=True):
            assert_same_bits(made[f"{name}.weight"], q.codes)  # uint8: that is how readers tell NVFP4 from MXFP4
            assert_same_bits(made[f"{name}.weight_scale"], q.scales)
            assert made[f"{name}.input_scale"] == 1
            assert f"{name}.scale" not in made
    untouched = [name for name in tensors if name.removesuffix(".weight").removesuffix(".scale") not in experts]
    for name in untouched:
        got = tensors[name].view(np.uint8) if tensors[name].dtype in (E4M3, E8M0) else tensors[name]
        assert_same_bits(made[name], got)
    assert set(made) == {
        *untouched,
        *(f"{name}.{part}" for name in experts for part in ("weight", "weight_scale", "weight_scale_2", "input_scale")),
    }
    written = plan.json_files["config.json"]["quantization_config"]
    assert {key: written[key] for key in quantization} == quantization
    assert written["moe_quant_algo"] == "NVFP4"
    assert sorted(written["quantized_layers"]) == sorted(experts)
    assert "mtp.0.ffn.experts.0.w1" in written["ignore"]
    assert "hf_quant_config.json" in plan.json_files
