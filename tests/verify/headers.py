"""Checkpoints that consist of headers alone, for tests of single checks: names, dtypes and shapes, and no data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.io.header import TensorInfo
from halfbyte.checkpoint.io.index import Checkpoint, Tensor, open_checkpoint
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents, read_contents
from tests.tiny_models import Tensors, write_checkpoint

Headers = dict[str, tuple[str, tuple[int, ...]]]
BYTES = {"U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8}


def checkpoint(headers: Headers, config: Mapping[str, Any] | None = None, path: Path = Path("nowhere")) -> Checkpoint:
    """A checkpoint of these tensors."""
    tensors, at = {}, 0
    for name, (dtype, shape) in headers.items():
        size = BYTES[dtype]
        for axis in shape:
            size *= axis
        tensors[name] = Tensor(TensorInfo(name, dtype, shape, at, at + size), "model.safetensors")
        at += size
    config = config or {}
    return Checkpoint(path, {}, tensors, config, config.get("quantization_config", {}), (), {})


def contents(headers: Headers) -> Contents:
    return read_contents(checkpoint(headers))


def opened(path: Path, tensors: Tensors, config: Mapping[str, Any] | None = None) -> Checkpoint:
    """A checkpoint with data, in one file."""
    return open_checkpoint(write_checkpoint(path, tensors, dict(config or {}), shards=1))


def lines(problems: Iterable[Problem]) -> list[str]:
    """Problems as the command prints them."""
    return [f"{problem.level} [{problem.rule}] {problem.name}: {problem.text}" for problem in problems]


def modelopt(name: str, rows: int = 16, columns: int = 128, inputs: bool = False) -> Headers:
    """An NVFP4 weight in Model-Optimizer's layout."""
    found: Headers = {
        f"{name}.weight": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_scale_2": ("F32", ()),
    }
    return found | ({f"{name}.input_scale": ("F32", ())} if inputs else {})


def compressed(name: str, rows: int = 16, columns: int = 128, inputs: bool = False) -> Headers:
    """An NVFP4 weight in compressed-tensors' layout."""
    found: Headers = {
        f"{name}.weight_packed": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("F8_E4M3", (rows, columns // 16)),
        f"{name}.weight_global_scale": ("F32", (1,)),
    }
    return found | ({f"{name}.input_global_scale": ("F32", (1,))} if inputs else {})


def mxfp4(name: str, rows: int = 16, columns: int = 128) -> Headers:
    """An MXFP4 weight in compressed-tensors' layout."""
    return {
        f"{name}.weight_packed": ("U8", (rows, columns // 2)),
        f"{name}.weight_scale": ("U8", (rows, columns // 32)),
    }


def int4(name: str, rows: int = 16, columns: int = 128, groups: int = 1) -> Headers:
    """An INT4 weight in compressed-tensors' layout."""
    return {
        f"{name}.weight_packed": ("I32", (rows, columns // 8)),
        f"{name}.weight_scale": ("BF16", (rows, groups)),
    }


def fp8(name: str, rows: int = 16, columns: int = 128, scales: tuple[int, ...] = ()) -> Headers:
    """An FP8 weight as Model-Optimizer and compressed-tensors store it."""
    return {f"{name}.weight": ("F8_E4M3", (rows, columns)), f"{name}.weight_scale": ("F32", scales)}


def plain(name: str, rows: int = 16, columns: int = 128) -> Headers:
    """An unquantized matrix."""
    return {f"{name}.weight": ("BF16", (rows, columns))}
