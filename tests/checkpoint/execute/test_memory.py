"""Memory: a tensor far larger than the limit is converted within it."""

from __future__ import annotations

import json
import math
import struct
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

# VmHWM is the peak of this program alone; ru_maxrss would count the parent that it was forked from.
PROGRAM = """
import sys
from pathlib import Path
from halfbyte.checkpoint import Options, Resources, make_plan, run
plan = make_plan(Path(sys.argv[1]), Options(to=sys.argv[3], layout=sys.argv[4], method="amax"))
run(plan, Path(sys.argv[2]), Resources(workers=2, max_memory=int(sys.argv[5]), sync=False))
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
print(int(status["VmHWM"].split()[0]) * 1024)
"""


def large(folder: Path, size: int, shape: list[int], name: str, config: dict[str, object]) -> None:
    """One tensor of that many bytes, in one file."""
    folder.mkdir()
    header = {name: {"dtype": "BF16", "shape": shape, "data_offsets": [0, size]}}
    raw = json.dumps(header).encode()
    piece = (np.random.default_rng(0).standard_normal(1 << 22) * 0.02).astype(np.float32).astype(ml_dtypes.bfloat16)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        for start in range(0, size, piece.nbytes):
            file.write(piece.view(np.uint8)[: size - start].data)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("shape", "limit", "name", "config", "to", "layout"),
    [
        ([32768, 8192], 128_000_000, "model.layers.0.mlp.down_proj.weight", {}, "nvfp4", "modelopt"),
        (
            [16, 2048, 4096],
            32_000_000,
            "model.layers.0.mlp.experts.gate_up_proj",
            {"model_type": "gpt_oss", "hidden_size": 2048, "intermediate_size": 2048},
            "mxfp4",
            "gpt-oss",
        ),
    ],
    ids=["512 MiB matrix in 128 MB", "256 MiB of transposed experts in 32 MB"],
)
def test_peak_memory_stays_below_the_limit(
    tmp_path: Path, shape: list[int], limit: int, name: str, config: dict[str, object], to: str, layout: str
) -> None:
    """At most the limit and 200 MB more for the process, as promised."""
    large(tmp_path / "s", 2 * math.prod(shape), shape, name, config)
    program = [sys.executable, "-c", PROGRAM, str(tmp_path / "s"), str(tmp_path / "d"), to, layout, str(limit)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit + 200_000_000
    assert 2 * math.prod(shape) > limit + 200_000_000


def wide(folder: Path, rows: int, columns: int) -> None:
    """One MXFP4 matrix in compressed-tensors' layout whose exponents spread over 40 octaves."""
    folder.mkdir()
    at = "model.layers.0.mlp.down_proj"
    codes, scales = rows * columns // 2, rows * columns // 32
    header = {
        f"{at}.weight_packed": {"dtype": "U8", "shape": [rows, columns // 2], "data_offsets": [0, codes]},
        f"{at}.weight_scale": {"dtype": "U8", "shape": [rows, columns // 32], "data_offsets": [codes, codes + scales]},
    }
    raw = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        piece = rng.integers(0, 256, 1 << 22, dtype=np.uint8)
        piece[: 3 << 20] = 0  # zero blocks take space in the file, and little time
        for start in range(0, codes, piece.size):
            file.write(np.roll(piece, start // 7919)[: codes - start].data)
        piece = rng.integers(90, 131, 1 << 20, dtype=np.uint8)
        for start in range(0, scales, piece.size):
            file.write(np.roll(piece, start // 104729)[: scales - start].data)
    config = {"quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}}
    (folder / "config.json").write_text(json.dumps(config))


def test_a_cast_that_no_window_holds_stays_below_the_limit(tmp_path: Path) -> None:
    """The survey is bounded however many blocks there are: 288 MB of blocks in 32 MB, and 200 MB for the process."""
    limit, rows, columns = 32_000_000, 65536, 8192
    wide(tmp_path / "s", rows, columns)
    assert (tmp_path / "s" / "model.safetensors").stat().st_size > limit + 200_000_000
    arguments = [str(tmp_path / "s"), str(tmp_path / "d"), "nvfp4", "modelopt", str(limit)]
    done = subprocess.run([sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < limit + 200_000_000
    assert json.loads((tmp_path / "d" / "halfbyte.json").read_text())["changed_blocks"]
