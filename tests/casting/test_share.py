"""Stacks of experts and partners: one global scale for all, or one an expert; and what the report says of each."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.casting.sources import decoded, random_source, source


def stack(tops: list[int], spread: int, seed: int = 0) -> hb.QuantizedTensor:
    """Experts whose exponents lie `spread` below their own top."""
    rng = np.random.default_rng(seed)
    exponents = np.stack([rng.integers(top - spread, top + 1, (4, 2)) for top in tops])
    exponents[:, 0, 0] = tops
    return source(exponents, rng.integers(0, 16, (len(tops), 4, 64)))


def expert(q: hb.QuantizedTensor, index: int) -> hb.QuantizedTensor:
    return hb.QuantizedTensor(
        q.format, q.shape[1:], np.asarray(q.codes)[index], np.asarray(q.scales)[index], None, None, q.contract
    )


def test_experts_far_apart_are_exact_with_a_scale_each() -> None:
    q = stack([0, -30, 20], 9)
    shared, report = hb.cast(q, "nvfp4")
    each, each_report = hb.cast(q, "nvfp4", share="expert")
    assert (report.label, each_report.label) == ("lossy", "bit-exact")
    assert_same_bits(hb.dequantize(each), hb.dequantize(q))
    assert np.asarray(each.global_scale).shape == (3, 4)
    assert np.asarray(each.global_scale)[:, 0].tolist() == [2.0**-8, 2.0**-38, 2.0**12]
    assert (each_report.m, len(each_report.parts)) == (None, 3)
    assert [part.m for part in each_report.parts] == [-8, -38, 12]
    assert np.asarray(shared.global_scale).shape == ()


def test_each_expert_is_cast_as_if_alone() -> None:
    q = stack([0, -3, 4], 22)
    each, report = hb.cast(q, "nvfp4", share="expert")
    for index, part in enumerate(report.parts):
        alone, alone_report = hb.cast(expert(q, index), "nvfp4")
        assert_same_bits(np.asarray(each.codes)[index], alone.codes)
        assert_same_bits(np.asarray(each.scales)[index], alone.scales)
        assert np.asarray(each.global_scale)[index, 0] == np.asarray(alone.global_scale)
        assert part == alone_report
    assert report.squared_error == pytest.approx(sum(part.squared_error for part in report.parts))
    assert report.blocks == sum(part.blocks for part in report.parts)


@pytest.mark.parametrize("share", ["tensor", "expert"])
def test_the_report_says_what_each_way_costs(share: str) -> None:
    q = stack([0, -12], 12)
    report = hb.cast(q, "nvfp4", share=share)[1]
    assert [(cost.share, cost.scales, cost.lossless) for cost in report.costs] == [
        ("tensor", 1, False),
        ("expert", 2, True),
    ]
    whole, each = report.costs
    assert whole.squared_error == hb.cast(q, "nvfp4")[1].squared_error > each.squared_error == 0
    assert whole.exact_blocks < each.exact_blocks == report.blocks
    assert "share expert" in str(report)
    assert str(report.blocks) in str(report)


@pytest.mark.parametrize("spread", [5, 24])
@pytest.mark.parametrize("algorithm", ["optimal", "hybrid", "verbatim", "requantize"])
def test_a_stack_of_one_expert(algorithm: str, spread: int) -> None:
    """One scale either way; with share="expert" each row carries it."""
    q = stack([3], spread)
    alone, alone_report = hb.cast(expert(q, 0), "nvfp4", algorithm)
    for share, shape in (("tensor", ()), ("expert", (1, 4))):
        (one, partner), both = hb.cast([q, q], "nvfp4", algorithm, share=share)
        result, report = hb.cast(q, "nvfp4", algorithm, share=share)
        assert result == one == partner
        assert np.asarray(result.stored_scale).shape == shape
        assert result.contract == alone.contract
        assert_same_bits(np.asarray(result.codes)[0], alone.codes)
        assert_same_bits(hb.dequantize(result)[0], hb.dequantize(alone))
        assert (report.label, report.m, report.parts) == (alone_report.label, alone_report.m, ())
        assert [(cost.share, cost.scales) for cost in report.costs] == [("tensor", 1), ("expert", 1)]
        assert {cost.squared_error for cost in report.costs} == {alone_report.squared_error}
        assert [(cost.share, cost.scales) for cost in both.costs] == [("tensor", 1), ("expert", 1), ("alone", 2)]


def test_a_matrix_has_nothing_to_share() -> None:
    assert hb.cast(random_source(np.random.default_rng(0), 20), "nvfp4")[1].costs == ()


def test_partners_share_their_scales() -> None:
    gate, up = stack([0, -30], 6, seed=1), stack([-9, -25], 6, seed=2)
    (new_gate, new_up), report = hb.cast([gate, up], "nvfp4", share="expert")
    assert_same_bits(np.asarray(new_gate.global_scale), np.asarray(new_up.global_scale))
    assert np.asarray(new_gate.global_scale)[:, 0].tolist() == [2.0**-8, 2.0**-33], "k_max is taken over both"
    assert report.label == "bit-exact"
    for new, old in ((new_gate, gate), (new_up, up)):
        assert_same_bits(hb.dequantize(new), hb.dequantize(old))
    assert [cost.share for cost in report.costs] == ["tensor", "expert", "alone"]
    assert [cost.scales for cost in report.costs] == [1, 2, 4]
    assert [cost.lossless for cost in report.costs] == [False, True, True]
    rows, columns = gate.shape[1], gate.shape[2]
    assert [part.shape for part in report.parts] == [(2 * rows, columns)] * 2, "an expert of both together"
    assert report.shape == (4 * rows, columns)


def test_partners_that_cannot_share_without_loss_show_what_it_costs() -> None:
    gate, up = (random_source(np.random.default_rng(seed), 10, top=top) for seed, top in ((1, 0), (2, -15)))
    results, report = hb.cast([gate, up], "nvfp4")
    error = sum(
        float(((np.asarray(hb.dequantize(new), np.float64) - decoded(old)) ** 2).sum())
        for new, old in zip(results, (gate, up), strict=True)
    )
    assert report.label == "lossy"
    assert report.squared_error == pytest.approx(error)
    together, alone = report.costs
    assert (together.share, together.lossless, alone.share, alone.lossless) == ("tensor", False, "alone", True)
    assert results[0].global_scale == results[1].global_scale


@pytest.mark.parametrize("algorithm", ["requantize", "verbatim", "hybrid"])
def test_partners_share_under_every_algorithm(algorithm: str) -> None:
    gate, up = (random_source(np.random.default_rng(seed), 20, top=top) for seed, top in ((1, 0), (2, -3)))
    results, report = hb.cast([gate, up], "nvfp4", algorithm=algorithm)
    assert results[0].global_scale == results[1].global_scale
    assert report.blocks == 64
    best = hb.cast([gate, up], "nvfp4")[1]
    assert best.squared_error <= report.squared_error


def test_a_list_of_one_is_a_list() -> None:
    results, report = hb.cast([random_source(np.random.default_rng(1), 3)], "nvfp4")
    assert isinstance(results, list)
    assert (len(results), report.label) == (1, "bit-exact")
