"""The Triton kernels of error feedback, run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_kernels_find_the_codes_of_the_reference() -> None:
    """On a few rows no sum is near a tie, so codes and scales are the same; also with a factor made by torch."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.feedback.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = ["nvfp4 modelopt 1.0000 1.0000"] * 2 + ["mxfp4 ocp 1.0000 1.0000"] * 2
    assert done.stdout.splitlines() == lines
