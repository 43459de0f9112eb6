"""The cast in chunks: exponents, survey, choice and rows give what `hb.cast` gives for the whole tensor."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.casting import optimal, scales
from halfbyte.casting.bound import Bounded
from halfbyte.casting.optimal import choose, write
from halfbyte.casting.rows import read
from halfbyte.casting.scales import nvfp4_rule
from halfbyte.casting.survey import survey_of
from halfbyte.casting.window import join
from halfbyte.codec.bits import F32
from halfbyte.contracts import get_contract
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, source, sources
from tests.casting.test_survey import cut

NVFP4 = hb.get_format("nvfp4")


def assert_chunks_agree(q: hb.QuantizedTensor, places: list[int], name: str) -> hb.CastReport:
    """Cast a tensor in chunks and as a whole; the same bytes, the same scale, the same count of changed blocks."""
    contract = get_contract(name, NVFP4)
    whole, report = hb.cast(q, "nvfp4", contract=contract)
    parts = cut(read(q, "q"), places)
    choice = choose(join(part.exponents for part in parts), lambda: survey_of(parts[::-1]), contract, contract)
    written = [write(part, choice) for part in parts]
    assert_same_bits(np.concatenate([part.codes for part in written]), whole.codes)
    assert_same_bits(np.concatenate([part.scales for part in written]), whole.scales)
    assert_same_bits(np.asarray(choice.scale.stored), np.asarray(whole.stored_scale))
    assert sum(part.changed for part in written) == report.requantized
    assert choice.bound <= report.squared_error
    assert report.lossless or not choice.keeps
    return report


@given(sources(), st.lists(st.integers(0, 10)), st.sampled_from(["modelopt", "compressed_tensors", "torchao"]))
@settings(max_examples=40, deadline=None)
def test_any_tensor_in_any_chunks(q: hb.QuantizedTensor, places: list[int], contract: str) -> None:
    assert_chunks_agree(q, places, contract)


@pytest.mark.parametrize("spread", range(0, 41, 2))
def test_wide_and_narrow(spread: int) -> None:
    q = random_source(np.random.default_rng(spread), spread, (12, 96))
    report = assert_chunks_agree(q, [1, 4, 5, 11], "modelopt")
    assert report.lossless == (spread <= 17)


def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are looked at a few at a time, odd widths and short last blocks among them."""
    for width in (96, 41):
        q = random_source(np.random.default_rng(1), 30, (40, width))
        whole, report = hb.cast(q, "nvfp4")
        with monkeypatch.context() as patch:
            patch.setattr("halfbyte.casting.rows.SLICE", 200)
            sliced, same = hb.cast(q, "nvfp4")
        assert_same_bits(sliced.codes, whole.codes)
        assert_same_bits(sliced.scales, whole.scales)
        assert same == report


def outlier() -> hb.QuantizedTensor:
    """One value far above many small blocks: the scale of algorithm 1 is better than any power of two."""
    rng = np.random.default_rng(6)
    exponents, codes = rng.integers(-21, -19, (32, 8)), rng.integers(0, 16, (32, 256))
    exponents[0, 0], codes[0, :32] = 0, 0
    codes[0, 0] = 6
    return source(exponents, codes)


@pytest.mark.parametrize("contract", ["modelopt", "compressed_tensors", "transformer_engine"])
def test_algorithm_1s_scale_is_a_candidate(contract: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the other candidates, and without the search for better ones, the result is as good as algorithm 1."""
    q = outlier()
    monkeypatch.setattr(optimal, "sampled_candidates", lambda survey, contract: [])
    monkeypatch.setattr(optimal, "_polished", lambda survey, contract, scale, error: (scale, error))
    monkeypatch.setattr(optimal, "prove", lambda survey, scale, error, contract: Bounded(scale, error, 0.0))
    result, report = hb.cast(q, "nvfp4", contract=contract)
    first, wanted = hb.cast(q, "nvfp4", "requantize", contract=contract)
    assert report.m is None
    assert report.squared_error <= wanted.squared_error
    assert report.squared_error < hb.cast(q, "nvfp4", "hybrid")[1].squared_error
    assert_same_bits(np.asarray(result.stored_scale), np.asarray(first.stored_scale))


def test_a_scale_is_lossless_only_as_the_contract_decodes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An invented contract rounds the multiplier that it stores to a power of two, so 3·2^m does not come back."""

    def snapped(stored: F32, top: np.float32) -> F32:
        return np.exp2(np.round(np.log2(stored))).astype(np.float32)

    def decode(q: F32, scale: F32, stored: F32, top: np.float32) -> F32:
        return q * (scale * snapped(stored, top))

    plain = get_contract("torchao", NVFP4)
    rule = dataclasses.replace(nvfp4_rule(plain), multiplier=snapped, decode=decode)
    invented = dataclasses.replace(plain, rules={"nvfp4": rule})
    monkeypatch.setattr(scales, "DECODES", [*scales.DECODES, (rule.stored_as, snapped, decode)])
    q = source(np.array([[0, -18]]), np.resize(np.array([3, 5, 7, 11, 13, 15]), 64)[None])
    survey = survey_of([read(q, "q")])
    assert optimal.choose_lossless(survey, plain) is not None
    assert optimal.choose_lossless(survey, invented) is None
    report = hb.cast(q, "nvfp4", contract=invented)[1]
    assert not report.lossless
    assert report.squared_error <= hb.cast(q, "nvfp4", "hybrid", contract=invented)[1].squared_error
