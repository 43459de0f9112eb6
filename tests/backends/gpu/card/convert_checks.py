"""Small conversions on a card: the files are those of the CPU. Every check returns its number of comparisons."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint import Options, Resources, make_plan, run

Array = npt.NDArray[Any]
BF16, E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
DTYPES = {BF16: "BF16", E4M3: "F8_E4M3", np.dtype(np.float16): "F16", np.dtype(np.float32): "F32"}
DTYPES |= {np.dtype(np.int32): "I32", np.dtype(np.int64): "I64", np.dtype(np.uint8): "U8"}
SHAPES = {"gate_proj": (512, 1024), "up_proj": (512, 1024), "down_proj": (1024, 512)}


def normal(seed: int, *shape: int) -> npt.NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.02).astype(np.float32)


def floats(dtype: npt.DTypeLike) -> dict[str, Array]:
    return {
        f"model.layers.{layer}.mlp.{name}.weight": normal(3 * layer + number, *shape).astype(dtype)
        for layer in range(3)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def fp8(block: tuple[int, int]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for number, (name, (rows, columns)) in enumerate(SHAPES.items()):
        at = f"model.layers.0.mlp.{name}"
        tensors[f"{at}.weight"] = (normal(number, rows, columns) * 500).astype(E4M3)
        tensors[f"{at}.weight_scale_inv"] = np.abs(normal(9, -(-rows // block[0]), -(-columns // block[1])))
    return tensors


def int4() -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for name, (rows, columns) in SHAPES.items():
        at, generator = f"model.layers.0.mlp.{name}", np.random.default_rng(rows)
        tensors[f"{at}.weight_packed"] = generator.integers(-(2**31), 2**31, (rows, columns // 8)).astype(np.int32)
        tensors[f"{at}.weight_scale"] = np.abs(normal(4, rows, columns // 32)).astype(BF16)
        tensors[f"{at}.weight_shape"] = np.array([rows, columns], np.int64)
    return tensors


def nvfp4() -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for number, (name, (rows, columns)) in enumerate(SHAPES.items()):
        at, generator = f"model.layers.0.mlp.{name}", np.random.default_rng(number)
        tensors[f"{at}.weight"] = generator.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
        tensors[f"{at}.weight_scale"] = generator.integers(0, 126, (rows, columns // 16), dtype=np.uint8).view(E4M3)
        tensors[f"{at}.weight_scale_2"] = np.array(0.003, np.float32)
    return tensors


INT4 = {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}}
NVFP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
SOURCES: dict[str, tuple[Callable[[], dict[str, Array]], dict[str, Any]]] = {
    "bf16": (lambda: floats(BF16), {}),
    "fp16": (lambda: floats(np.float16), {}),
    "fp32": (lambda: floats(np.float32), {}),
    "fp8 blocks": (lambda: fp8((128, 128)), {"quantization_config": {"quant_method": "fp8"}}),
    "fp8 tensor": (lambda: fp8((10**6, 10**6)), {"quantization_config": {"quant_method": "fp8"}}),
    "int4": (int4, INT4),
    "nvfp4": (nvfp4, NVFP4),
}


def write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    """A checkpoint of one file."""
    header: dict[str, object] = {}
    at = 0
    for name, x in tensors.items():
        header[name] = {"dtype": DTYPES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + x.nbytes]}
        at += x.nbytes
    text = json.dumps(header).encode()
    folder.mkdir()
    data = b"".join(x.tobytes() for x in tensors.values())
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 3, **config}))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def conversions() -> int:
    """Every kind of source to NVFP4 and MXFP4, whole and in pieces, with lanes that hold everything or little."""
    done = 0
    for kind, (make, config) in SOURCES.items():
        for to, layout in (("nvfp4", "modelopt"), ("mxfp4", "compressed-tensors")):
            if kind == to:
                continue
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                write(folder / "s", make(), config)
                plan = make_plan(folder / "s", Options(to=to, layout=layout))
                run(plan, folder / "cpu", Resources(workers=4, sync=False))
                expected = files(folder / "cpu")
                for number, (chunk, memory) in enumerate([(1 << 25, None), (1 << 16, 1 << 28), (300_000, 1 << 25)]):
                    resources = Resources(workers=4, sync=False, chunk=chunk, device="cuda", max_gpu_memory=memory)
                    run(plan, folder / f"gpu{number}", resources)
                    assert files(folder / f"gpu{number}") == expected, f"{kind} to {to}, pieces of {chunk}"
                    done += 1
    return done


CHECKS: dict[str, Callable[[], int]] = {"conversions": conversions}
