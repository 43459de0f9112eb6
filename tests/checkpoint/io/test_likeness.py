"""The fingerprint of a model: of its config, its headers, and of some bytes from the middle of its tensors."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from halfbyte.checkpoint.io import likeness
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.checkpoint.io.likeness import fingerprint_of
from tests.checkpoint.toy import write_checkpoint


def test_what_the_fingerprint_is_made_of(tmp_path: Path) -> None:
    """Statistics keep it: other digits would make those of today strangers to their model."""
    rng = np.random.default_rng(0)
    tensors = {f"t{size}": rng.integers(0, 256, size, dtype=np.uint8) for size in (0, 1, 511, 512, 513, 514, 2000)}
    source = write_checkpoint(tmp_path / "s", tensors, {"b": 1, "a": 2}, shards=2)
    config = [("a", 2), ("b", 1), ("model_type", "llama"), ("num_hidden_layers", 2)]
    wanted = hashlib.sha256(repr(config).encode())
    files = sorted(source.glob("*.safetensors"))
    for path in files:
        raw = path.read_bytes()
        header = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
        wanted.update(f"{path.name} {hashlib.sha256(header).hexdigest()}".encode())
    for name in (*list(tensors)[0::2], *list(tensors)[1::2]):
        x = tensors[name]
        skip = max(0, x.size - 512) // 2
        wanted.update(x[skip : skip + 512].tobytes())
    checkpoint = open_checkpoint(source)
    before = len(os.listdir("/proc/self/fd"))
    assert fingerprint_of(checkpoint) == wanted.hexdigest()
    assert len(os.listdir("/proc/self/fd")) == before
    opened = Files({path.name: str(path) for path in files})
    assert fingerprint_of(checkpoint, opened) == wanted.hexdigest()
    assert opened._descriptors, "files that are given stay open"
    opened.close()


@pytest.mark.parametrize(
    ("count", "looked_at"), [(1, [0]), (4, [0, 1, 2, 3]), (5, [0, 2, 4]), (8, [0, 2, 4, 6]), (9, [0, 3, 6]), (0, [])]
)
def test_of_many_tensors_some_are_looked_at(monkeypatch: pytest.MonkeyPatch, count: int, looked_at: list[int]) -> None:
    """All over the model, and no more than so many."""
    assert likeness.LOOKED_AT == 4096
    monkeypatch.setattr(likeness, "LOOKED_AT", 4)
    read: list[int] = []
    files: Any = SimpleNamespace(read=lambda file, offset, into: read.append(offset // 100))
    tensors = {str(i): SimpleNamespace(start=100 * i, bytes=8) for i in range(count)}
    header = SimpleNamespace(tensors=tensors, digest="x")
    made: Any = SimpleNamespace(config={}, headers={"a": header})
    assert len(fingerprint_of(made, files)) == 64
    assert read == looked_at
