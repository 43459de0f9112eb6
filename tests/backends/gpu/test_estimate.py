"""The constants by which candidates share a rounding (cuda/estimate.cu), for every significand of the largest scale."""

from __future__ import annotations

import re

import numpy as np
import pytest

from halfbyte.backends.gpu.cuda.table_kernels import SOURCES
from halfbyte.formats import E2M1, E4M3

SOURCE = (SOURCES / "estimate.cu").read_text()
GROUPS = [tuple(map(int, found)) for found in re.findall(r"estimate<(\d), (\d), (\d)>\(", SOURCE)]
"""First candidate, number of candidates, and the one whose step they share."""


def constant(name: str, candidate: int) -> float:
    """a or b of a candidate, as the source has it."""
    body = re.search(rf"{name}\(int k\) \{{ return k < 6 \? ([0-9.]+)f : k < 8 \? ([0-9.]+)f : ([0-9.]+)f; \}}", SOURCE)
    assert body is not None
    return float(body[1 if candidate < 6 else 2 if candidate < 8 else 3])


def test_every_candidate_is_in_one_group() -> None:
    assert [first + i for first, count, _ in GROUPS for i in range(count)] == list(range(9))


@pytest.mark.parametrize("last", range(64, 72))
def test_shared_steps_round_alike(last: int) -> None:
    """Every y that can occur, in small steps: the shared step gives the nearest value of the grid."""
    scales = E4M3.values.astype(np.float64)
    most = 3.5 * scales[last + 1]  # the amax is below this, or the next scale would not be excluded
    x = np.linspace(0, most, 200_001)[:-1]
    for first, count, middle in GROUPS:
        shared = x / scales[last - middle]
        step = 2.0 ** (
            np.floor(np.log2(constant("shared_step", middle) * shared**2 + constant("shared_offset", middle))) - 4
        )
        for k in range(first, first + count):
            y = x / scales[last - k]
            q = np.rint(y / step) * step
            if k == 8:
                q = np.minimum(q, 6)
            nearest = np.abs(y[:, None] - E2M1.magnitudes[None, :]).min(axis=1)
            assert np.allclose(np.abs(q - y), nearest, rtol=0, atol=1e-12), k
            assert (y.max() <= 7) == (k < 8)
