"""Kernels under Triton's interpreter, in a process of their own (interpreted.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_every_kernel_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.gpu.interpreted"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["75", "comparisons"]
