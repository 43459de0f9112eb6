"""Load a checkpoint's layers with SGLang's config and loader code, and write the weights it would multiply with.

    python sglang_client.py CHECKPOINT OUTPUT.npz

Runs in SGLang's own environment, without a GPU: compiled packages are replaced by empty ones. SGLang itself parses the
quantization config, decides which layers are quantized, creates the fused layers and fills them through their weight
loaders. Then each layer is decoded with the one scale that SGLang takes for it, the largest of its members. Attention
of every layer and dense MLPs; experts need kernels.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

# fmt: off
COMPILED = (
    "aiter", "av", "blobfile", "cuda", "cutlass", "datasets", "decord", "deep_ep", "deep_gemm", "deepseek_recipe",
    "easydict", "flash_attn", "flash_mla", "flashinfer", "humming", "kernels", "llguidance", "modelscope",
    "mooncake", "nvshmem", "outlines", "quack", "sgl_kernel", "smg_grpc_servicer", "soundfile", "tilelang", "timm",
    "tml_renderers", "torch_memory_saver", "torchaudio", "torchcodec", "torchvision", "triton_kernels", "tvm_ffi",
    "xgrammar", "xxhash", "zstandard",
)
# fmt: on
FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def quantization(checkpoint: Path, config: dict[str, Any]) -> Any:
    """SGLang's own reading of the config; for Model-Optimizer, of both files."""
    part = config["quantization_config"]
    place = "sglang.srt.layers.quantization"
    if part["quant_method"] == "compressed-tensors":
        reader = import_module(f"{place}.compressed_tensors.compressed_tensors").CompressedTensorsConfig
        reader._check_scheme_supported = lambda *_, **__: True  # asks for a GPU's capability
        found = reader.from_config(part | {"packed_modules_mapping": {}})
    else:
        reader = import_module(f"{place}.modelopt_quant").ModelOptFp4Config
        found = reader.from_config(part)
        older = checkpoint / "hf_quant_config.json"
        if older.exists():
            again = reader.from_config(json.loads(older.read_text()))
            if sorted(again.exclude_modules) != sorted(found.exclude_modules):
                raise SystemExit("SGLang reads different exclude lists from the two config files")
    found.packed_modules_mapping = {name: list(parts) for name, parts in FUSED.items()}
    return found


def layers(config: dict[str, Any], tensors: dict[str, Any], quant_config: Any) -> Any:
    """(prefix, layer, members) of attention and dense MLP."""
    linear, torch = import_module("sglang.srt.layers.linear"), import_module("torch")
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width, key_heads, inner = config["head_dim"], config["num_key_value_heads"], config["intermediate_size"]
    options = {
        "bias": False,
        "quant_config": quant_config,
        "params_dtype": torch.bfloat16,
        "parallel_group": "replicated",
    }
    for number in range(config["num_hidden_layers"]):
        attention, mlp = f"model.layers.{number}.self_attn", f"model.layers.{number}.mlp"
        prefix = f"{attention}.qkv_proj"
        yield (
            prefix,
            linear.QKVParallelLinear(hidden, width, heads, key_heads, prefix=prefix, **options),
            ("q", "k", "v"),
        )
        prefix = f"{attention}.o_proj"
        yield prefix, linear.RowParallelLinear(heads * width, hidden, prefix=prefix, **options), ()
        if any(name.startswith(f"{mlp}.down_proj.") for name in tensors):
            prefix = f"{mlp}.gate_up_proj"
            yield prefix, linear.MergedColumnParallelLinear(hidden, [inner] * 2, prefix=prefix, **options), (0, 1)
            prefix = f"{mlp}.down_proj"
            yield prefix, linear.RowParallelLinear(inner, hidden, prefix=prefix, **options), ()


def fill(prefix: str, layer: Any, shards: tuple[object, ...], tensors: dict[str, Any]) -> None:
    """Through each parameter's own weight loader, as SGLang's models do."""
    parent, _, leaf = prefix.rpartition(".")
    for index, member in enumerate(FUSED.get(leaf, (leaf,))):
        for name, parameter in layer.named_parameters():
            stored = tensors.get(f"{parent}.{member}.{name}")
            if stored is None and name != "input_scale":  # SGLang takes 1 for an absent one
                raise SystemExit(f"SGLang wants {parent}.{member}.{name}, which is not there")
            if stored is not None:
                parameter.weight_loader(parameter, stored, *shards[index : index + 1])


def decoded(layer: Any) -> tuple[Any, bool]:
    """The weight as float32, and whether SGLang took it as quantized.

    Factors in the order of tests/quantized.py: in another one, last bits differ, and they decide where a value lies in
    the middle of two numbers of bfloat16. Under a headroom of 448/256 many values of a layer do.
    """
    torch = import_module("torch")
    parts = {name: parameter.data for name, parameter in layer.named_parameters()}
    if "weight_scale" not in parts:
        return parts["weight"].float(), False
    packed = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    if "weight_global_scale" in parts:
        multiplier = 1 / parts["weight_global_scale"].max()
    else:
        multiplier = parts["weight_scale_2"].max()
    scales = parts["weight_scale"].float() * multiplier
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(1).long()
    values = magnitudes[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return values * scales.repeat_interleave(16, dim=1), True


def prepare() -> None:
    """Make SGLang importable."""
    transformers = import_module("transformers")
    for name in ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoProcessor", "AutoTokenizer"):
        getattr(transformers, name)  # transformers looks for real packages: before there are empty ones
    import_module("stand_ins").install(COMPILED)


def main() -> None:
    checkpoint, output = Path(sys.argv[1]), Path(sys.argv[2])
    prepare()
    config = json.loads((checkpoint / "config.json").read_text())
    load_file = import_module("safetensors.torch").load_file
    tensors = {name: tensor for file in checkpoint.glob("*.safetensors") for name, tensor in load_file(file).items()}
    weights, quantized = {}, 0
    for prefix, layer, shards in layers(config, tensors, quantization(checkpoint, config)):
        fill(prefix, layer, shards, tensors)
        values, is_quantized = decoded(layer)
        weights[prefix] = values.numpy()
        quantized += is_quantized
    import_module("numpy").savez(output, **weights)
    print(f"{len(weights)} layers, {quantized} quantized")


if __name__ == "__main__":
    main()
