"""The usual way to convert: load a shard with torch, quantize tensor by tensor in eager mode, save the shard.

miles' converter works like this. Its quantizer is TransformerEngine's Python reference, which runs here too.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conformance.peers.transformer_engine import reference

ENDINGS = (".gate_proj.weight", ".up_proj.weight", ".down_proj.weight")


def is_expert(name: str) -> bool:
    return ".experts." in name and name.endswith(ENDINGS)


def convert_eagerly(source: Path, destination: Path, files: list[str]) -> int:
    """Convert the given shards. A first pass finds the amaxes that pairs share. Returns the number of bytes read."""
    destination.mkdir(parents=True)
    amaxes: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(source / file, framework="pt") as shard:
            names: list[str] = list(shard.keys())
            for name in names:
                if is_expert(name) and "down_proj" not in name:
                    pair = name.rsplit(".", 2)[0]
                    amax = shard.get_tensor(name).abs().max().float()
                    amaxes[pair] = torch.maximum(amaxes[pair], amax) if pair in amaxes else amax
    quantizer = reference().NVFP4QuantizerRef
    total = 0
    for file in files:
        converted: dict[str, torch.Tensor] = {}
        for name, weight in load_file(source / file).items():
            total += weight.numel() * weight.element_size()
            if not is_expert(name):
                converted[name] = weight
                continue
            amax = amaxes.get(name.rsplit(".", 2)[0]) if "down_proj" not in name else None
            shared = weight.float().abs().max() if amax is None else amax
            codes, scales = quantizer._quantize_blockwise_reference(weight, shared, 16, 1, pow_2_scales=False, eps=0.0)
            module = name.removesuffix(".weight")
            converted[name] = codes
            converted[f"{module}.weight_scale"] = scales
            encode = torch.tensor(2688.0) / shared
            converted[f"{module}.weight_scale_2"] = 1.0 / encode
            converted[f"{module}.input_scale"] = torch.ones(())
        save_file(converted, destination / file, metadata={"format": "pt"})
    return total
