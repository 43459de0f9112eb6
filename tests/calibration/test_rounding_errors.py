"""What rounding costs each column: by its definition, and with the same bits on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.calibration import rounding_errors
from halfbyte.calibration.rounding_errors import HostErrors
from halfbyte.contracts import get_contract
from halfbyte.formats import get_format
from halfbyte.testing import assert_same_bits


@pytest.mark.parametrize(("name", "contract"), [("nvfp4", "modelopt"), ("mxfp4", "ocp")])
@pytest.mark.parametrize("weighted", [False, True])
def test_the_definition(monkeypatch: pytest.MonkeyPatch, name: str, contract: str, weighted: bool) -> None:
    """However many rows are rounded at once: sums over rows are taken in order."""
    rng, format = np.random.default_rng(0), get_format(name)
    values = rng.standard_normal((45, 64)).astype(np.float32)
    largest = 2 * np.abs(values).max(axis=0)
    weights = np.exp(rng.standard_normal(45)) if weighted else None
    exponents = rng.integers(-8, 9, 64).astype(np.int8)
    scaled = np.ldexp(values, exponents.astype(np.int32))
    amax = np.ldexp(largest, exponents.astype(np.int32)).max() if name == "nvfp4" else None
    q = hb.quantize(scaled, name, contract, "amax" if name == "nvfp4" else None, global_amax=amax)
    lost = (np.asarray(hb.dequantize(q)) - scaled).astype(np.float64)
    wanted = np.zeros(64)
    for row, one in enumerate(lost):
        wanted += one**2 * (1.0 if weights is None else weights[row])
    for strip in (64, 7 * 64, 1 << 17):
        monkeypatch.setattr(rounding_errors, "STRIP", strip)
        assert_same_bits(
            HostErrors(values, largest, weights, format, get_contract(contract, format))(exponents), wanted
        )


def test_nothing_is_lost_of_zeros() -> None:
    format = get_format("nvfp4")
    none = HostErrors(np.zeros((3, 16), np.float32), np.zeros(16, np.float32), None, format, get_contract(None, format))
    assert_same_bits(none(np.ones(16, np.int8)), np.zeros(16))


def test_a_gpu_has_the_same_bits() -> None:
    import triton  # noqa: F401  # where it is missing, so is this test (tests/oldest.py)

    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.calibration.rounding_interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "the same bits\n"), done.stderr
