"""Values that were only converted to another float: off by no more than one rounding and the slack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.codec.bits import F32
from halfbyte.verify.against.rounded import _outside, rounding_problems
from halfbyte.verify.stored import read_contents
from halfbyte.verify.values import matrices
from tests.samples import f32
from tests.tiny_models import BF16
from tests.verify.headers import lines, opened
from tests.verify.matrices import matrix

SLACK = 2.0**-20


@pytest.mark.parametrize("sign", [1, -1])
def test_the_slack_is_the_same_on_both_sides(sign: int) -> None:
    wanted = np.full(6, sign, np.float32)
    stored = np.float32(sign) * (1 + np.float32(SLACK) * f32(0, 0.9, 1.5, 1.9, -0.9, -1.5)).astype(np.float32)
    assert _outside(stored, wanted, SLACK).tolist() == [False, False, True, True, False, True]
    ends = np.float32(sign) * f32(1 + SLACK, 1 - SLACK)
    assert _outside(ends, wanted[:2], SLACK).tolist() == [False, False]


def test_one_rounding_to_a_shorter_float() -> None:
    wanted: F32 = np.linspace(-3, 3, 1001, dtype=np.float32)
    stored = wanted.astype(ml_dtypes.bfloat16)
    assert not _outside(stored, wanted, SLACK).any()
    other = np.nextafter(stored, ml_dtypes.bfloat16(np.inf))
    assert _outside(other, wanted, SLACK).mean() > 0.99
    both = f32(np.nan, np.inf, np.nan, 1)
    assert _outside(both, f32(np.nan, np.inf, 1, np.nan), SLACK).tolist() == [False, False, True, True]


def told(path: Path, ours: Any, theirs: F32) -> list[str]:
    made = opened(path, {"w.weight": ours})
    mine = matrices(made, read_contents(made))["w"]
    return [line.partition("w: ")[2] for line in lines(rounding_problems(path, mine, matrix("w", theirs)))]


ONCE = "each should be the source's, rounded once"
FIRST = "row 3, column 1 is 1.5, the source is 1"


@pytest.mark.parametrize("chunk", [1, 100, 1 << 21])
def test_the_first_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    wanted = np.ones((40, 50), np.float32)
    got = wanted.astype(BF16)
    assert told(tmp_path / "a", got, wanted) == []
    got[3, 1] = 1.5
    assert told(tmp_path / "b", got, wanted) == [f"bf16: {FIRST}; {ONCE}"]
    got[3, 2:] = 2
    got[30, 0] = 7
    assert told(tmp_path / "c", got, wanted) == [f"bf16: {FIRST} (and 49 more values); {ONCE}"]
    got[30, 0], got[3, 2:] = 1, 1
    got[30, 0] = -1
    assert told(tmp_path / "d", got, wanted) == [f"bf16: {FIRST} (and 1 more value); {ONCE}"]


@pytest.mark.parametrize(("dtype", "step"), [(BF16, 2.0**-7), (np.float16, 2.0**-10), (np.float32, 2.0**-18)])
def test_another_rounding_is_no_damage(tmp_path: Path, dtype: Any, step: float) -> None:
    """Up to a value in a thousand and one, those that are off by a step are damage; more of them are a rounding."""
    kind = {BF16: "bf16", np.float16: "f16", np.float32: "f32"}[dtype]
    wanted = np.full((40, 50), 1 + step / 8, np.float32)
    got = wanted.astype(dtype)
    other = dtype(1 + step)
    got[5, :3] = other
    (line,) = told(tmp_path / "a", got, wanted)
    assert line.startswith(f"{kind}: row 5, column 0 is ")
    assert line.endswith(f" (and 2 more values); {ONCE}")
    got[5, 3] = other
    assert len(told(tmp_path / "b", got, wanted)) == (dtype is np.float32)  # float32 rounds nothing
    assert len(told(tmp_path / "c", got[:39], wanted[:39])) == (dtype is np.float32)
    got[39, 49] = dtype(1 + 2 * step + step * (dtype is np.float32))
    (line,) = told(tmp_path / "d", got, wanted)
    assert line.endswith(f" (and 4 more values); {ONCE}")


@pytest.mark.parametrize(("dtype", "step"), [(BF16, 2.0**-7), (np.float16, 2.0**-10), (np.float32, 2.0**-23)])
def test_a_step_of_a_dtype(tmp_path: Path, dtype: Any, step: float) -> None:
    """Where most values are off, one that is off by more than a step still tells damage."""
    wanted = np.full((40, 50), 1, np.float32)
    far = step if dtype is not np.float32 else 2.0**-19
    for number, steps in enumerate((1, 2)):
        got = np.full((40, 50), dtype(1 + far * steps))
        assert bool(told(tmp_path / str(number), got, wanted)) == (steps == 2 or dtype is np.float32)


def test_matrices_that_are_no_tensor_are_left_alone() -> None:
    assert list(rounding_problems(Path(), matrix("w", [[1]]), matrix("w", [[2]]))) == []
