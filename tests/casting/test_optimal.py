"""The cast in chunks: exponents, survey, choice and rows give what `hb.cast` gives for the whole tensor."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.casting.optimal import choose, write
from halfbyte.casting.rows import read
from halfbyte.casting.survey import survey_of
from halfbyte.casting.window import join
from halfbyte.contracts import get_contract
from halfbyte.testing import assert_same_bits
from tests.casting.sources import random_source, sources
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
