"""The Triton kernels of error feedback, run by Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_kernels_have_the_bits_of_the_reference() -> None:
    """A factor that torch makes may differ in its last bits."""
    import triton  # noqa: F401  # where it is missing, so is this test (tests/oldest.py)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.feedback.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    close = "a factor made by torch is close"
    assert done.stdout.splitlines() == ["nvfp4 modelopt: the same bits", close, "mxfp4 ocp: the same bits", close]
