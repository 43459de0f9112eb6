"""FP8 values that are more than half a step of E4M3 from the source: how far, how many, and where the first is."""

from __future__ import annotations

import numpy as np
import pytest

from halfbyte.codec.bits import F32
from halfbyte.verify.against.eights import _far, fp8_problems
from halfbyte.verify.against.measure import measure
from tests.samples import f32
from tests.verify.headers import lines
from tests.verify.matrices import matrix


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("scale", [1.0, 0.25])
@pytest.mark.parametrize(
    ("stored", "source", "far"),
    [
        (1.0, 1 + 0.0668, False),  # half a step of 1/8, and 7 % more
        (1.0, 1 + 0.0670, True),
        (1.125, 1.125 - 0.0670, True),
        (1.125, 1.125 - 0.0668, False),
        (0.9375, 1.0, False),  # the larger of both gives the step
        (1.0, 0.9375, False),
        (2.0, 2 + 0.1336, False),
        (2.0, 2 + 0.1340, True),
        (0.0, 2.0**-10 * 1.069, False),  # below the normal numbers, steps stay as they are
        (0.0, 2.0**-6 * float(np.float32(2.0**-4 * 1.07)), False),
        (0.0, 2.0**-10 * 1.071, True),
        (2.0**-7, 2.0**-7 + 2.0**-10 * 1.069, False),
        (2.0**-7, 2.0**-7 + 2.0**-10 * 1.071, True),
        (2.0**-6, 2.0**-6 + 2.0**-10 * 1.071, True),
        (2.0**-5, 2.0**-5 + 2.0**-9 * 1.069, False),
        (448.0, 1e6, False),
        (448.0, np.inf, False),
        (416.0, 1e6, True),
    ],
)
def test_half_a_step(stored: float, source: float, far: bool, scale: float, sign: int) -> None:
    got, wanted = f32(sign * stored * scale), f32(sign * source * scale)
    assert _far(got, wanted, f32(scale)).tolist() == [far]


def told(got: F32, wanted: F32) -> list[str]:
    ones = np.ones((1, 1), np.float32)
    mine = matrix("w", got, kind="fp8", multipliers=lambda start, stop: ones)
    theirs = matrix("w", wanted)
    return lines(fp8_problems(mine, theirs, measure(mine, theirs)))


FIRST = "error [values] w: fp8: row 3, column 7 is 1.25, the source is 1: more than half a step off"


@pytest.mark.parametrize("chunk", [1, 100, 1 << 21])
def test_the_first_is_named(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Up to one value in a thousand and one; beyond that, rows are judged."""
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    wanted = np.ones((40, 50), np.float32)
    got = wanted.copy()
    assert told(got, wanted) == []
    got[3, 7] = 1.25
    assert told(got, wanted) == told(got[:4, :10], wanted[:4, :10]) == [FIRST]
    wanted[3, 9] = 1.5
    assert told(got, wanted) == [f"{FIRST} (and 1 more value)"]
    got[20, 0] = 2
    assert told(got, wanted) == [f"{FIRST} (and 2 more values)"]
    errors = ["error [row] w: row 3: relative error 0.0781", "error [row] w: row 20: relative error 0.141"]
    assert [line.partition(";")[0] for line in told(got[:39], wanted[:39])] == errors
    got[20, 1] = 2
    assert [line.partition(";")[0] for line in told(got, wanted)] == [errors[0], errors[1].replace("0.141", "0.2")]


def test_values_without_multipliers_are_left_alone() -> None:
    mine, theirs = matrix("w", [[1, 2]]), matrix("w", [[1, 9]])
    assert list(fp8_problems(mine, theirs, measure(mine, theirs))) == []
