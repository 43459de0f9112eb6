"""Arrays of jax and mlx, in a process of their own (check_jax_mlx.py): once jax is imported, it warns of every fork."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_arrays_of_jax_and_mlx() -> None:
    if importlib.util.find_spec("jax") is None:
        raise ModuleNotFoundError("No module named 'jax'", name="jax")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/check_jax_mlx.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert "33 passed" in done.stdout, done.stdout[-500:]
