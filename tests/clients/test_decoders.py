"""Model-Optimizer, torchao, compressed-tensors and transformers decode what `halfbyte convert` writes to our values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from conformance.peers.spec import quiet
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.testing import assert_same_bits
from halfbyte.verify.stored import read_contents
from halfbyte.verify.values import matrices
from tests.clients.converted import converted

Tensors = dict[str, torch.Tensor]


def tensors_of(path: Path) -> Tensors:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def ours(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """(module, values as float32) of every quantized weight, as verify decodes it."""
    checkpoint = open_checkpoint(path)
    contents = read_contents(checkpoint)
    for name, matrix in matrices(checkpoint, contents).items():
        if matrix.plain is None:
            yield name, torch.from_numpy(matrix.read(0, matrix.shape[0]))


@pytest.mark.parametrize("model", ["llama", "qwen3_moe"])
def test_model_optimizer_and_torchao_agree(tmp_path: Path, model: str) -> None:
    path = converted(tmp_path, model, "--to", "nvfp4", "--layout", "modelopt")
    with quiet():  # these warn when they are imported
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    tensors, count = tensors_of(path), 0
    for module, values in ours(path):
        codes, scales, scale = (tensors[f"{module}.{part}"] for part in ("weight", "weight_scale", "weight_scale_2"))
        for dtype in (torch.float32, torch.bfloat16):
            modelopt = NVFP4QTensor(values.shape, dtype, codes).dequantize(
                dtype=dtype, scale=scales, double_scale=scale, block_sizes={-1: 16}, fast=False
            )
            torchao = NVFP4Tensor(codes, scales, 16, dtype, scale, None, False).dequantize(dtype)
            assert_same_bits(modelopt, values.to(dtype))
            # Model-Optimizer reads code 8 as +0, torchao as -0: the same value
            assert_same_bits(torchao + 0.0, values.to(dtype))
        count += 1
    assert count == {"llama": 14, "qwen3_moe": 32}[model]


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
def test_compressed_tensors_agrees(tmp_path: Path, format: str) -> None:
    path = converted(tmp_path, "llama", "--to", format, "--layout", "compressed-tensors")
    with quiet():
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from torchao.prototype.mx_formats.mx_tensor import to_dtype
    tensors, count = tensors_of(path), 0
    compressor = BaseCompressor.get_value_from_registry(f"{format}-pack-quantized")
    scheme = preset_name_to_scheme(f"{format.upper()}A16", ["Linear"])
    for module, values in ours(path):
        stored = ("weight_packed", "weight_scale", *(["weight_global_scale"] if format == "nvfp4" else []))
        decoded = compressor.decompress({part: tensors[f"{module}.{part}"] for part in stored}, scheme)["weight"]
        assert_same_bits(decoded, values.to(decoded.dtype))
        if format == "mxfp4":
            exponents = tensors[f"{module}.weight_scale"].view(torch.float8_e8m0fnu)
            codes = tensors[f"{module}.weight_packed"]
            torchao = to_dtype(codes, exponents, torch.float4_e2m1fn_x2, 32, torch.float32)
            assert_same_bits(torchao, values)
        count += 1
    assert count == 14


@pytest.mark.parametrize("model", ["gpt_oss", "gpt_oss_mxfp4"])
def test_transformers_unpacks_gpt_oss(tmp_path: Path, model: str) -> None:
    """Rows of gate and up alternate: both sides must take the same ones."""
    path = converted(tmp_path, model, "--to", "mxfp4", "--layout", "gpt-oss")
    with quiet():
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    tensors, values = tensors_of(path), dict(ours(path))
    for name in [name for name in tensors if name.endswith("gate_up_proj_blocks")]:
        stack = name.removesuffix("_blocks")
        unpacked = convert_moe_packed_tensors(tensors[name], tensors[f"{stack}_scales"], dtype=torch.bfloat16)
        for expert in range(unpacked.shape[0]):
            module = stack.replace("gate_up_proj", str(expert))
            for part, first in (("gate_proj", 0), ("up_proj", 1)):
                wanted = values[f"{module}.{part}"].to(torch.bfloat16).T.contiguous()
                assert_same_bits(unpacked[expert][:, first::2].contiguous(), wanted)
