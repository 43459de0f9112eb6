"""Errors of small matrices, to the last digit; and what the sums over blocks say of a weight."""

from __future__ import annotations

import math

import numpy as np
import pytest

from halfbyte.backends.compare import Compared, ScaleMark
from halfbyte.verify.against import measure as module
from halfbyte.verify.against.measure import Measured, _Codes, _relative, measure
from halfbyte.verify.against.scale_rules import ScaleRules
from halfbyte.verify.problems import WeightError
from tests.verify.matrices import matrix
from tests.verify.weights import Weight


@pytest.mark.parametrize("chunk", [1, 4, 1 << 21])
def test_errors_of_a_plain_matrix(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    theirs = matrix("t", [[3, 4], [0, 0], [0, 0], [1, 0], [np.inf, 1]])
    mine = matrix("m", [[3, 1], [0, 0], [0, -7], [np.nan, 0], [1, 1]], kind="bf16")
    found = measure(mine, theirs)
    assert (found.error.name, found.error.kind, found.error.shape) == ("m", "bf16", (5, 2))
    assert math.isnan(found.error.relative)
    np.testing.assert_array_equal(found.row_errors, [0.6, 0, np.inf, np.nan, np.nan])
    part = measure(matrix("m", [[3, 1], [0, 0]]), matrix("t", [[3, 4], [0, 0]]))
    assert (part.error.relative, part.error.largest, part.row_errors.tolist()) == (0.6, 3.0, [0.6, 0])
    assert (part.blocks, part.wrong_blocks, part.by_amax, part.rule, part.odd_scales) == (0, {}, False, "", [])
    assert (part.factors, part.factor_error, part.explained) == ((1.0, 1.0), math.inf, 0.0)


def test_the_relative_error_of_a_whole() -> None:
    assert _relative(9, 36) == 0.5
    assert _relative(0, 0) == _relative(0, 4) == 0
    assert _relative(1, 0) == math.inf
    assert math.isnan(_relative(math.nan, 1))


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("chunk", [128, 384, 1 << 21])
def test_rows_and_blocks_of_codes(monkeypatch: pytest.MonkeyPatch, chunk: int, kernel: bool) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    if not kernel:
        monkeypatch.setattr(module, "compare_rows", lambda *arguments: None)
    weight = Weight(np.random.default_rng(2).standard_normal((8, 128)).astype(np.float32), "nvfp4", "modelopt")
    clean = measure(*weight.pair)
    assert (clean.wrong_blocks, clean.blocks, clean.by_amax) == ({}, 8, True)
    assert (clean.rule, clean.odd_scales) == ("maps the largest magnitude to 6", [])
    assert clean.factors[0] == pytest.approx(0.99234, abs=1e-4)
    weight.codes[5, 0] ^= 7
    weight.codes[5, 63] ^= 7
    weight.codes[2, 16] ^= 7
    found = measure(*weight.pair)
    assert found.wrong_blocks == {2: 1, 5: 2}
    decoded = weight.read(0, 8)
    off = np.linalg.norm((decoded - weight.source).astype(np.float64), axis=1)
    np.testing.assert_allclose(
        found.row_errors, off / np.linalg.norm(weight.source.astype(np.float64), axis=1), rtol=1e-5
    )
    assert found.error.largest == pytest.approx(float(np.abs(decoded - weight.source).max()), rel=1e-6)


def concluded(*sums: float, marked: bool = True) -> Measured:
    codes = _Codes(matrix("m", np.zeros((4, 32))))
    empty = np.zeros(4)
    marks = np.full((2, 2), ScaleMark.TOLD | ScaleMark.EXACTLY_SIX | ScaleMark.EXACTLY_FOUR, np.uint8)
    for start in (0, 2):
        wrong = np.array([0, 3], np.int64)
        part = Compared(empty, empty, wrong, marks if marked else None, np.array(sums) / 2, 0.0, 2)
        codes.feed(start, part)
    measured = Measured(WeightError("m", "nvfp4", (4, 32), 0.1, 0.1), np.zeros(4))
    codes.conclude(measured)
    assert codes.rules == (None if not marked else codes.rules)
    assert codes.rules is None or codes.rules.blocks == 8
    return measured


def test_factors_and_what_they_explain() -> None:
    """Sums of product, power, squares and spread, over all parts."""
    found = concluded(6, 4, 12, 16)
    assert (found.factors, found.factor_error, found.explained) == ((1.5, 2.0), 1.0, 0.25)
    assert (found.wrong_blocks, found.blocks) == ({1: 3, 3: 3}, 2)
    exact = concluded(4, 4, 4, 0)
    assert (exact.factors, exact.factor_error, exact.explained) == ((1.0, 1.0), 0.0, 0.0)
    more = concluded(3, 2, 5, 0)  # squared error 1, of which (1.5 - 1)^2 * 2 goes away
    assert more.explained == 0.5
    for sums in ((0, 4, 12, 16), (-6, 4, 12, 16), (6, 0, 12, 16)):
        none = concluded(*sums)
        assert (none.factors, none.factor_error, none.explained) == ((1.0, 1.0), math.inf, 0.0)
    untouched = Measured(WeightError("m", "nvfp4", (0, 32), 0, 0), np.zeros(0))
    _Codes(matrix("m", np.zeros((0, 32)))).conclude(untouched)
    assert (untouched.blocks, untouched.wrong_blocks, untouched.rule) == (0, {}, "")
    unmarked = concluded(6, 4, 12, 16, marked=False)
    assert (unmarked.factors, unmarked.rule, unmarked.by_amax) == ((1.0, 1.0), "", False)


def test_weights_of_mxfp4_have_no_rules() -> None:
    assert ScaleRules(1).judged == 0
    found = measure(*Weight(np.ones((2, 64), np.float32), "mxfp4").pair)
    assert (found.rule, found.factors, found.blocks, found.wrong_blocks) == ("", (1.0, 1.0), 2, {})
