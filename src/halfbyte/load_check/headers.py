"""The tensors of a checkpoint as its headers tell them: names, dtypes and shapes, on the meta device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.errors import CheckpointError

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
}
"""dtype in a header → its name in torch."""


def meta_tensors(path: Path) -> dict[str, Any]:
    """Name → torch tensor without bytes."""
    import torch

    found = {}
    for name, tensor in open_checkpoint(path).tensors.items():
        if tensor.dtype not in TORCH_NAMES:
            raise CheckpointError(f"{path / tensor.file}: tensor {name} is {tensor.dtype}, which torch does not have")
        dtype = getattr(torch, TORCH_NAMES[tensor.dtype])
        found[name] = torch.empty(tensor.shape, dtype=dtype, device="meta")
    return found
