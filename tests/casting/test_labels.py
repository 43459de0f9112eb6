"""The label of a cast against measuring: every contract, every exponent, -0.0 and overflow to Inf included."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import halfbyte as hb
from halfbyte.casting import measure, to_nvfp4
from halfbyte.casting.rows import decodes_powers
from halfbyte.casting.scales import power
from halfbyte.contracts import CONTRACTS, NVFP4Rule
from tests.casting.sources import Matrix, source, sources
from tests.samples import codes_of

ALGORITHMS = ("optimal", "hybrid", "verbatim")
SOURCES = ["ocp", "gguf"]
"""One contract that reads code 8 as -0.0, and one that reads it as +0.0."""

EVERY_CODE = np.resize(np.arange(16), 32)
SMALL_CODES = np.resize(np.array([0, 1, 2, 3, 9, 10, 11]), 32)
"""No -0.0 and no magnitude above 1.5: fewer values overflow."""


def holds_a_cast(name: str) -> bool:
    rule = CONTRACTS[name]().rules.get("nvfp4")
    return isinstance(rule, NVFP4Rule) and rule.stored is not None and rule.constant_factor is None


TARGETS = [name for name in CONTRACTS if holds_a_cast(name)]


def measured(q: hb.QuantizedTensor, result: hb.QuantizedTensor) -> str:
    """The label by its definition, from the bytes and from what both tensors decode to."""
    before, after = (np.asarray(hb.dequantize(tensor), np.float32) for tensor in (q, result))
    codes, made = (codes_of(np.asarray(tensor.codes))[..., : q.shape[-1]] for tensor in (q, result))
    same_codes = np.array_equal(codes, made)
    if same_codes and np.array_equal(before.view(np.uint32), after.view(np.uint32)):
        return "bit-exact"
    return "value-exact" if np.array_equal(before, after) else "lossy"


def cast_or_none(
    q: hb.QuantizedTensor, algorithm: str, contract: str | None
) -> tuple[hb.QuantizedTensor, hb.CastReport] | None:
    """None where the contract cannot store the global scale."""
    try:
        return hb.cast(q, "nvfp4", algorithm=algorithm, contract=contract)
    except hb.UnsupportedError:
        return None


def test_the_contracts_here_are_all_there_are() -> None:
    readers = [make() for make in CONTRACTS.values() if "mxfp4" in make().rules]
    signs = {contract.rules["mxfp4"].negative_zero for contract in readers if decodes_powers(contract)}
    assert {CONTRACTS[name]().rules["mxfp4"].negative_zero for name in SOURCES} == signs == {True, False}
    assert {"modelopt", "torchao", "compressed_tensors", "transformer_engine", "fouroversix"} <= set(TARGETS)


@pytest.mark.parametrize("contract", [None, *TARGETS])
@pytest.mark.parametrize("reader", SOURCES)
def test_every_exponent(reader: str, contract: str | None) -> None:
    seen = set()
    for k in range(-127, 128):
        for codes in (EVERY_CODE, SMALL_CODES):
            q = source(np.array([[k]]), codes[None], reader)
            for algorithm in ALGORITHMS:
                found = cast_or_none(q, algorithm, contract)
                if found is not None:
                    result, report = found
                    assert report.label == measured(q, result), (k, algorithm)
                    seen.add(report.label)
    assert "bit-exact" in seen
    assert ("lossy" in seen) == (contract in ("transformer_engine", "fouroversix")), "the only ones that overflow"


@pytest.mark.parametrize("contract", TARGETS)
def test_the_exponent_255_is_refused(contract: str) -> None:
    q = source(np.array([[128]]), EVERY_CODE[None])
    with pytest.raises(hb.InputError, match="NaN"):
        hb.cast(q, "nvfp4", contract=contract)


@pytest.mark.parametrize(("k", "label"), [(114, "bit-exact"), (115, "lossy"), (124, "lossy")])
@pytest.mark.parametrize("contract", ["transformer_engine", "fouroversix"])
def test_a_contract_that_overflows_while_decoding_is_lossy(contract: str, k: int, label: str) -> None:
    """((q·S)·A)/c is Inf where q·S·A is, though the quotient would fit float32."""
    q = source(np.array([[k]]), EVERY_CODE[None])
    result, report = hb.cast(q, "nvfp4", contract=contract)
    assert report.label == label
    assert np.isinf(np.asarray(hb.dequantize(result))).any() == (label == "lossy")
    assert (report.requantized, report.verbatim) == ((1, 0) if label == "lossy" else (0, 1))
    assert np.isinf(report.max_error) == (label == "lossy")


def test_a_source_of_inf_is_kept_as_inf() -> None:
    q = source(np.array([[127]]), EVERY_CODE[None])
    result, report = hb.cast(q, "nvfp4")
    assert np.isinf(np.asarray(hb.dequantize(q))).any()
    assert report.label == measured(q, result) == "bit-exact"


@given(
    sources(),
    st.sampled_from(SOURCES),
    st.sampled_from([None, *TARGETS]),
    st.sampled_from(ALGORITHMS),
)
@settings(max_examples=150, deadline=None)
def test_any_tensor(q: hb.QuantizedTensor, reader: str, contract: str | None, algorithm: str) -> None:
    q = dataclasses.replace(q, contract=CONTRACTS[reader]())
    found = cast_or_none(q, algorithm, contract)
    if found is not None:
        result, report = found
        assert report.label == measured(q, result)
        assert report.blocks == report.zero + report.verbatim + report.recoded + report.requantized


@pytest.mark.parametrize("contract", TARGETS)
@pytest.mark.parametrize("codes", [EVERY_CODE, SMALL_CODES, EVERY_CODE & 8], ids=["every", "small", "zeros"])
def test_the_fast_path_reports_what_measuring_reports(
    contract: str, codes: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that fits the window is not decoded; without that short cut the report is the same."""
    for k in (-120, -30, 0, 90, 113, 114, 115, 120):
        q = source(
            np.array([[k, k - 17], [k, k - 3]]) if k > 0 else np.array([[k], [k]]), np.tile(codes, (2, 1 + (k > 0)))
        )
        with monkeypatch.context() as patch:
            fast = cast_or_none(q, "optimal", contract)
            patch.setattr(to_nvfp4, "decodes_kept", lambda *_: False)
            slow = cast_or_none(q, "optimal", contract)
        assert (fast is None) == (slow is None)
        if fast is not None and slow is not None:
            assert dataclasses.replace(fast[1], signal=0.0) == dataclasses.replace(slow[1], signal=0.0)


@pytest.mark.parametrize("junk", [0x00, 0x50, 0xF0])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "requantize"])
def test_the_half_byte_behind_the_last_element_is_no_code(algorithm: str, junk: int) -> None:
    """Rows of an odd length: what stands there neither makes a cast inexact nor a block recoded."""
    codes = np.tile(np.where(EVERY_CODE == 8, 0, EVERY_CODE), (2, 2))[:, :33]
    codes[:, -1] = 7
    q = source(np.array([[3, 1], [2, 2]]), codes)
    packed = np.asarray(q.codes).copy()
    packed[:, -1] |= junk
    q = dataclasses.replace(q, codes=packed)
    result, report = hb.cast(q, "nvfp4", algorithm)
    assert (report.label, report.verbatim, report.recoded) == (measured(q, result), 4, 0)
    assert report.label == "bit-exact"
    again, report = hb.cast(dataclasses.replace(result, codes=packed), "mxfp4")
    assert (report.label, report.verbatim, report.recoded) == ("bit-exact", 6, 0)
    assert np.array_equal(np.asarray(again.codes)[:, :16], packed[:, :16])


def test_measuring_is_left_out_where_it_is_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("measured")

    monkeypatch.setattr(to_nvfp4, "compare", refuse)
    q = source(np.array([[114, 97]]), np.tile(EVERY_CODE, 2)[None])
    assert hb.cast(q, "nvfp4", contract="transformer_engine")[1].label == "bit-exact"
    with pytest.raises(AssertionError, match="measured"):
        hb.cast(source(np.array([[115]]), EVERY_CODE[None]), "nvfp4", contract="transformer_engine")


def test_zero_blocks_decode_to_zero_under_any_scale_byte() -> None:
    assert measure.decodes_kept(power(0, hb.contracts.modelopt()), 0, None)
    codes = np.concatenate([EVERY_CODE, EVERY_CODE & 8])[None]
    for contract in TARGETS:
        for k in (-60, 113):
            q = source(np.array([[k, 127]]), codes)
            result, report = hb.cast(q, "nvfp4", contract=contract)
            assert report.label == measured(q, result), (contract, k)
