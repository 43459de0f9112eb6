"""Reads and writes that transfer a part, are interrupted or fail, wherever that happens, also in compiled calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoint.toy import random, write_checkpoint

AT = "model.layers.0.mlp"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that stands before the system's."""
    path = tmp_path_factory.mktemp("faults") / "faults.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(path), str(HERE / "faults.c"), "-ldl"], check=True)
    return path


@pytest.mark.parametrize("method", ["amax", "optimal", "mxfp4"])
def test_every_read_and_write(tmp_path: Path, before: Path, method: str) -> None:
    """Partners of two steps of the kernel; a matrix whose codes are written in two steps; a tensor that is copied."""
    tensors = {f"{AT}.{name}_proj.weight": random(len(name), 131, 1056) for name in ("gate", "up")}
    tensors[f"{AT}.down_proj.weight"] = random(9, 640, 1024, dtype=np.float16)
    tensors["model.norm.weight"] = random(1, 1024)
    source = write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1}, shards=2)
    program = [sys.executable, "-m", "tests.checkpoint.execute.faulty", str(source), str(tmp_path), method]
    environment = {**os.environ, "LD_PRELOAD": str(before)}
    done = subprocess.run(program, capture_output=True, text=True, timeout=300, cwd=HERE.parents[2], env=environment)
    assert done.returncode == 0, done.stderr
