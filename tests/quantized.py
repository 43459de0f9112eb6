"""Tiny quantized checkpoints for the tests of verify and of the clients.

This is a second, smaller writer of the same layouts. It does not use the converter, so a mistake in one of them shows.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

import halfbyte as hb
from tests.tiny_models import BF16, E4M3, MODELS, Array, Config, Tensors, read_safetensors, write_checkpoint

Layout = Literal["modelopt", "compressed-tensors"]
GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
SCHEME = {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False}


def is_quantized(name: str) -> bool:
    """Linear layers of attention, MLP and experts."""
    return name.endswith("_proj.weight") and "visual" not in name


def write_quantized(
    directory: Path,
    model: str = "llama",
    layout: Layout = "modelopt",
    format: Literal["nvfp4", "mxfp4"] = "nvfp4",
    activations: bool = False,
    seed: int = 0,
) -> Path:
    """A model of tests.tiny_models with its linear layers quantized."""
    tensors, config = MODELS[model](seed)
    stored: Tensors = {}
    for name, values in tensors.items():
        if is_quantized(name):
            amax = max(float(np.abs(tensors[other].astype(np.float32)).max()) for other in sharing(name, tensors))
            stored |= module_tensors(name.removesuffix(".weight"), values, layout, format, amax, activations)
        else:
            stored[name] = values
    ignore = [name.removesuffix(".weight") for name, v in tensors.items() if v.ndim == 2 and not is_quantized(name)]
    ignore = sorted(name for name in ignore if "embed" not in name)
    write_checkpoint(
        directory, stored, config | {"quantization_config": config_part(layout, format, activations, ignore)}
    )
    if layout == "modelopt":
        nested: Config = {"quant_algo": "NVFP4" if activations else "W4A16_NVFP4", "kv_cache_quant_algo": None}
        nested |= {"group_size": 16, "exclude_modules": ignore}
        text = json.dumps({"producer": {"name": "modelopt", "version": "0.47.0"}, "quantization": nested})
        (directory / "hf_quant_config.json").write_text(text)
    return directory


def sharing(name: str, tensors: Tensors) -> Iterator[str]:
    """Names of all tensors that share a scale with this one, including itself."""
    module, leaf = name.removesuffix(".weight").rsplit(".", 1)
    group = next((group for group in GROUPS if leaf in group), (leaf,))
    return (f"{module}.{part}.weight" for part in group if f"{module}.{part}.weight" in tensors)


def module_tensors(module: str, values: object, layout: Layout, format: str, amax: float, activations: bool) -> Tensors:
    matrix = np.asarray(values)
    if format == "mxfp4":
        q = hb.quantize(matrix, "mxfp4")
        return {f"{module}.weight_packed": np.asarray(q.codes), f"{module}.weight_scale": np.asarray(q.scales)}
    q = hb.quantize(matrix, "nvfp4", "modelopt", global_amax=amax)
    scales, scale = np.asarray(q.scales).view(E4M3), np.float32(np.asarray(q.stored_scale))
    if layout == "modelopt":
        tensors: Tensors = {f"{module}.weight": np.asarray(q.codes), f"{module}.weight_scale": scales}
        tensors[f"{module}.weight_scale_2"] = np.asarray(scale)
        return tensors | ({f"{module}.input_scale": np.asarray(np.float32(1))} if activations else {})
    tensors = {f"{module}.weight_packed": np.asarray(q.codes), f"{module}.weight_scale": scales}
    tensors[f"{module}.weight_global_scale"] = np.asarray([1 / scale], np.float32)
    return tensors | ({f"{module}.input_global_scale": np.ones(1, np.float32)} if activations else {})


def config_part(layout: Layout, format: str, activations: bool, ignore: list[str]) -> Config:
    if layout == "modelopt":
        return {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4" if activations else "W4A16_NVFP4",
            "ignore": ignore,
            "producer": {"name": "modelopt", "version": "0.47.0"},
        }
    nv = format == "nvfp4"
    scheme = SCHEME | {"strategy": "tensor_group" if nv else "group", "group_size": 16 if nv else 32}
    scheme |= {"scale_dtype": "torch.float8_e4m3fn" if nv else "torch.uint8"}
    inputs = scheme | {"dynamic": "local"} if activations else None
    name = "nvfp4-pack-quantized" if nv else "mxfp4-pack-quantized"
    group = {"targets": ["Linear"], "format": name, "weights": scheme, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": name,
        "quantization_status": "compressed",
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }


def edit(directory: Path, changes: Tensors | None = None, drop: tuple[str, ...] = (), **config: object) -> None:
    """Replace or drop tensors of a checkpoint, and keys of its quantization_config; the index follows."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= read_safetensors(file)
        file.unlink()
    known = json.loads((directory / "config.json").read_text())
    if config:
        known["quantization_config"] |= config
    tensors = {name: values for name, values in (tensors | (changes or {})).items() if name not in drop}
    write_checkpoint(directory, tensors, known)


def load(directory: Path) -> Tensors:
    """All tensors of a checkpoint."""
    tensors: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= read_safetensors(file)
    return tensors


E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def decode(codes: Array, scales: Array, block: int, multiplier: float = 1.0) -> Array:
    """Values of packed codes, computed without the library. Scales are E4M3, or exponents as uint8."""
    packed = codes.astype(np.uint8)
    values = E2M1[np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)]
    if scales.dtype == np.uint8:
        each = np.exp2(scales.astype(np.float32) - 127)
    else:
        each = scales.astype(np.float32) * np.float32(multiplier)
    return np.asarray(values * np.repeat(each, block, axis=-1))


def dequantized(tensors: Tensors) -> Tensors:
    """A quantized checkpoint's tensors with every weight decoded to float32; gpt-oss stacks as [experts, in, out]."""
    plain: Tensors = {}
    helpers = (
        ".weight_scale",
        ".weight_scale_2",
        ".weight_global_scale",
        ".input_scale",
        ".input_global_scale",
        "_scales",
    )
    for name, values in tensors.items():
        module = name.removesuffix("_packed").removesuffix(".weight")
        if name.endswith("_blocks"):
            stack = name.removesuffix("_blocks")
            decoded = decode(values, tensors[f"{stack}_scales"][..., None], 32)
            plain[stack] = np.swapaxes(decoded.reshape(*values.shape[:2], -1), 1, 2)
        elif f"{module}.weight_scale" in tensors and values.dtype == np.uint8 and not name.endswith(helpers):
            scales = tensors[f"{module}.weight_scale"]
            multiplier, block = 1.0, 32 if scales.dtype == np.uint8 else 16
            if f"{module}.weight_scale_2" in tensors:
                multiplier = float(tensors[f"{module}.weight_scale_2"].astype(np.float32).reshape(-1)[0])
            elif f"{module}.weight_global_scale" in tensors:
                multiplier = float(1 / tensors[f"{module}.weight_global_scale"].astype(np.float32)[0])
            plain[f"{module}.weight"] = decode(values, scales, block, multiplier)
        elif not name.endswith(helpers):
            plain[name] = values
    return plain


def write_dequantized(directory: Path, quantized: Path, dtype: npt.DTypeLike = BF16) -> Path:
    """Write the decoded model, which any reader of the quantized model should compute."""
    config = json.loads((quantized / "config.json").read_text())
    config.pop("quantization_config", None)
    tensors = {name: values.astype(dtype) for name, values in dequantized(load(quantized)).items()}
    return write_checkpoint(directory, tensors, config | {"dtype": "float32" if dtype is np.float32 else "bfloat16"})
