"""Model-Optimizer's cast as a contract: where it differs from algorithm 3. Its bytes are tested by the vectors."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.casting.sources import decoded, random_source, source
from tests.samples import codes_of

LOSSLESS = "quantize_mxfp4_to_nvfp4_lossless"


def closed_form(k_max: int | None = None) -> hb.contracts.Contract:
    return hb.contracts.modelopt(mode=LOSSLESS, k_max=k_max)


def test_inside_the_window_codes_come_back_without_negative_zero() -> None:
    q = random_source(np.random.default_rng(0), 17)
    result, report = hb.cast(q, "nvfp4", contract=closed_form())
    codes = codes_of(np.asarray(q.codes))
    assert_same_bits(codes_of(np.asarray(result.codes)), np.where(codes == 8, 0, codes).astype(np.uint8))
    assert np.array_equal(decoded(result), decoded(q))
    assert (report.label, report.m) == ("value-exact", -8)
    assert report.algorithm == f"modelopt(mode='{LOSSLESS}')"


def test_byte_0_is_taken_for_an_empty_block() -> None:
    """Its 2^-127 times 6 is lost under a scale made for the others; halfbyte's own cast counts it."""
    q = source(np.array([[-127, 0]]), np.full((1, 64), 7))
    assert hb.cast(q, "nvfp4", contract=closed_form())[1].m == -8
    assert hb.cast(q, "nvfp4", algorithm="hybrid")[1].k_min == -127


def test_partners_share_the_larger_k_max() -> None:
    low, high = (random_source(np.random.default_rng(seed), 5, top=top) for seed, top in ((1, -9), (2, -2)))
    results, report = hb.cast([low, high], "nvfp4", contract=closed_form())
    assert [float(np.asarray(result.global_scale)) for result in results] == [2.0**-10, 2.0**-10]
    given, _ = hb.cast(low, "nvfp4", contract=closed_form(k_max=-2))
    assert_same_bits(results[0].scales, given.scales)
    assert_same_bits(results[0].codes, given.codes)
    assert report.lossless


def test_through_bfloat16_is_algorithm_1() -> None:
    q = random_source(np.random.default_rng(3), 20)
    theirs, report = hb.cast(q, "nvfp4", contract=hb.contracts.modelopt(mode="quantize_mxfp4_to_nvfp4"))
    ours, wanted = hb.cast(q, "nvfp4", algorithm="requantize")
    assert_same_bits(theirs.codes, ours.codes)
    assert_same_bits(theirs.scales, ours.scales)
    assert report.squared_error == wanted.squared_error


@pytest.mark.parametrize("spread", [18, 30])
def test_errors_are_those_of_algorithm_3(spread: int) -> None:
    """Half by half or for the block of 32: below the window both end at the smallest scale."""
    q = random_source(np.random.default_rng(spread), spread, (16, 256))
    theirs = hb.cast(q, "nvfp4", contract=closed_form())[1]
    assert theirs.squared_error == hb.cast(q, "nvfp4", algorithm="hybrid")[1].squared_error


def test_ragged_rows_are_cast_too() -> None:
    q = random_source(np.random.default_rng(4), 25, (3, 40))
    result, report = hb.cast(q, "nvfp4", contract=closed_form())
    assert (result.shape, np.asarray(result.scales).shape) == ((3, 40), (3, 3))
    error = float(((decoded(result) - decoded(q)) ** 2).sum())
    assert report.squared_error == pytest.approx(error)
