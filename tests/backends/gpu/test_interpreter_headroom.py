"""The choice of headroom under Triton's interpreter, in a process of its own (interpreted_headroom.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_headroom_under_the_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.gpu.interpreted_headroom"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-2:] == ["33", "comparisons"]
