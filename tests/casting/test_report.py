"""Reports: what a tally adds up to, and every line of the text, whole."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from halfbyte.casting.measure import exact_tally, tally_values
from halfbyte.casting.report import CastReport, ShareCost, Tally, add, describe

TALLY = Tally(10, 1, 2, 3, 4, 0.5, 0.25, 8.0, 320, False)
REPORT = describe(TALLY, "mxfp4", "nvfp4", "optimal", (2, 160))


def test_a_report_of_a_tally() -> None:
    assert CastReport(
        source="mxfp4", target="nvfp4", algorithm="optimal", shape=(2, 160), label="lossy", blocks=10, zero=1,
        verbatim=2, recoded=3, requantized=4, squared_error=0.5, max_error=0.25, signal=8.0, elements=320,
    ) == REPORT  # fmt: skip
    assert (REPORT.k_min, REPORT.k_max, REPORT.m, REPORT.global_scales, REPORT.bound) == (None, None, None, (), None)
    assert (REPORT.share, REPORT.costs, REPORT.parts, REPORT.spread, REPORT.lossless) == ("tensor", (), (), None, False)
    assert REPORT.mse == 0.5 / 320
    assert REPORT.snr == 10 * math.log10(16)
    assert replace(REPORT, k_min=-3).spread is replace(REPORT, k_max=-3).spread is None
    assert replace(REPORT, k_min=-3, k_max=4).spread == 7
    assert replace(REPORT, squared_error=0.0).snr == math.inf
    assert replace(REPORT, signal=0.0).snr == -math.inf


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({}, "lossy"),
        ({"requantized": 0}, "lossy"),
        ({"squared_error": 0.0}, "lossy"),
        ({"requantized": 0, "squared_error": 0.0}, "value-exact"),
        ({"requantized": 0, "squared_error": 0.0, "same_codes": True}, "bit-exact"),
        ({"same_codes": True}, "lossy"),
    ],
)
def test_labels(changes: dict[str, float], label: str) -> None:
    assert replace(TALLY, **changes).label == label  # type: ignore[arg-type]


def test_tallies_add_up() -> None:
    other = Tally(1, 2, 3, 4, 5, 1e-20, 0.5, 1.0, 7, True)
    assert add([TALLY, other, other]) == Tally(12, 5, 8, 11, 14, 0.5, 0.5, 10.0, 334, False)
    assert add([other, other]).same_codes
    assert add([other]) == other
    tiny = [replace(other, squared_error=value) for value in (1.0, 1e-16, 1e-16)]
    assert add(tiny).squared_error == 1.0000000000000002, "rounded once"
    assert add([TALLY, replace(other, squared_error=math.inf)]).squared_error == math.inf
    assert math.isnan(add([TALLY, replace(other, signal=math.nan)]).signal)


def test_the_text_of_a_lossy_cast() -> None:
    report = replace(REPORT, k_min=-9, k_max=12, m=4, global_scales=(16.0,), bound=0.25)
    assert str(report) == (
        "mxfp4 -> nvfp4, optimal, 2x160: lossy\n"
        "  exponents  -9 to 12, spread 21, m 4\n"
        "  blocks     10: 1 zero, 2 verbatim, 3 recoded, 4 requantized\n"
        "  error      squared 0.5, max 0.25, SNR 12.04 dB\n"
        "  bound      no choice has less than 0.25, 50.00%"
    )
    assert str(REPORT).splitlines()[1:] == str(report).splitlines()[2:4]
    assert ", global scale 0.333333343\n" in str(replace(report, m=None, global_scales=(float(np.float32(1 / 3)),)))
    assert ", 2 global scales\n" in str(replace(report, m=None, global_scales=(1.0, 2.0)))


def test_the_text_of_a_lossless_cast() -> None:
    costs = (ShareCost("tensor", 1, False, 6, 0.125), ShareCost("expert", 2, True, 10, 0.0))
    report = replace(REPORT, label="bit-exact", squared_error=0.0, bound=0.0, costs=costs)
    assert str(report).splitlines() == [
        "mxfp4 -> nvfp4, optimal, 2x160: bit-exact",
        "  blocks     10: 1 zero, 2 verbatim, 3 recoded, 4 requantized",
        "  share tensor 1 global scale, 6 blocks exact, squared error 0.125",
        "  share expert 2 global scales, 10 blocks exact, lossless",
    ]
    assert report.lossless


def test_the_tally_of_kept_rows() -> None:
    assert exact_tally(10, 3, 320, True) == Tally(10, 3, 7, 0, 0, 0.0, 0.0, 0.0, 320, True)
    assert not exact_tally(10, 3, 320, False).same_codes


def test_a_tally_of_values() -> None:
    """Blocks of two: zero, kept, equal in other codes, changed, changed from zero; Inf, NaN."""
    old = np.array([[0, -0.0, 1, 2, 3, 4, 5, 6, 0, 0]], np.float32)
    new = np.array([[0, 0.0, 1, 2, 3, 4, 5, 8, 1, 0]], np.float32)
    kept = np.array([[True, True, False, True, True]])
    found = tally_values(old, new, 2, kept, True)
    assert found == Tally(5, 1, 1, 1, 2, 5.0, 2.0, 91.0, 10, False)
    assert tally_values(old, old, 2, kept, True) == Tally(5, 2, 2, 1, 0, 0.0, 0.0, 91.0, 10, True)
    assert not tally_values(old, old, 2, kept, False).same_codes
    assert tally_values(old, new, 2, None, False).verbatim == 0
    assert tally_values(old, new, 2, None, False).recoded == 2
    ragged = tally_values(old[:, :3], new[:, :3], 2, None, True)
    assert (ragged.blocks, ragged.zero, ragged.recoded, ragged.elements) == (2, 1, 1, 3)
    special = np.array([[np.inf, np.nan, 1, np.nan]], np.float32)
    assert tally_values(special, special, 2, None, True).max_error == 0
    broken = tally_values(special, np.array([[np.inf, np.nan, np.nan, 1]], np.float32), 2, None, True)
    assert (broken.max_error, broken.squared_error, broken.requantized) == (np.inf, np.inf, 1)
