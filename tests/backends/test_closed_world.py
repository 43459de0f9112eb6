"""For invented formats, contracts and methods, every backend gives the bytes of the reference or a reason.

tests/invented.py draws them at random. `python -m tests.backends.test_closed_world 0 9000` runs any range of seeds.
tests/sanitize.py runs some of them under the sanitizers, and tests/backends/gpu/ runs the GPU kernels.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.contracts import exponents, expressions
from halfbyte.contracts.peers.flashinfer import ceil_bits_of_factor
from halfbyte.contracts.spec import MXRule, NVFP4Rule, Rounding, ScaleByte, TensorScale
from halfbyte.formats import BlockFormat, ElementFormat
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits
from tests.backends.test_bits import ISA_NAMES
from tests.backends.ways import WAYS, way
from tests.invented import Invented, draw
from tests.samples import F32, U8, gaussian

SEEDS = 960
CHUNKS = 12


def assert_same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor) -> None:
    """Compare all four arrays and the decoded values."""
    for part in ("codes", "scales", "stored_scale", "global_scale"):
        left, right = getattr(got, part), getattr(expected, part)
        assert (left is None) == (right is None)
        if right is not None:
            assert_same_bits(to_numpy(left), to_numpy(right))
    # The bits of a NaN that comes from a product depend on the processor.
    assert_same_bits(hb.dequantize(got), hb.dequantize(expected, backend="reference"), any_nan=True)


def answers(invented: Invented, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Compare the kernels of every instruction set, and "auto", with the reference. Yields what each answered."""
    try:
        expected = invented.quantize("reference")
    except hb.HalfbyteError:
        for backend in ("cpu", "auto"):
            with pytest.raises(hb.HalfbyteError):
                invented.quantize(backend)
        yield "refused by all"
        return
    assert_same(invented.quantize("auto"), expected)
    for isa in ISA_NAMES:
        monkeypatch.setenv("HALFBYTE_ISA", isa)
        try:
            for taken in WAYS if isa == ISA_NAMES[-1] else ("by tables",):
                with way(taken):
                    assert_same(invented.quantize("cpu"), expected)
        except hb.errors.BackendError:
            yield "refused"
        else:
            yield "served"
    monkeypatch.delenv("HALFBYTE_ISA")


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_the_reference_or_a_reason(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    counted: collections.Counter[str] = collections.Counter()
    for seed in range(chunk, SEEDS, CHUNKS):
        invented = draw(seed)
        try:
            counted.update(answers(invented, monkeypatch))
        except Exception as error:
            raise AssertionError(str(invented)) from error
    assert counted["served"] >= 20
    assert counted["refused"] >= 20


# --- single cases that a kernel could mistake for a known one ---

ONCE_WRONG = (399, 2316, 7353, 8513, 13562, 29812, 35347, 62170)
"""Seeds for which some kernel gave other bytes: mixtures of formulas that no contract has together."""


@pytest.mark.parametrize("seed", ONCE_WRONG)
def test_a_mixture_that_was_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(answers(draw(seed), monkeypatch))


E3M2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3)
X = gaussian(4, 96)


def half_over(x: F32, scale: F32, t: TensorScale) -> F32:
    """x/(S·s2/2)/2"""
    return np.asarray(x / (scale * t.factor / np.float32(2)) / np.float32(2), np.float32)


def times_twice(x: F32, scale: F32, t: TensorScale) -> F32:
    """(x·(1/S))·(1/s2)"""
    return np.asarray((x * (np.float32(1) / scale)) * (np.float32(1) / t.factor), np.float32)


def with_rule(contract: contracts.Contract, format: str, **slots: object) -> contracts.Contract:
    """A contract with other slots in its rule for a format."""
    return dataclasses.replace(contract, rules={format: dataclasses.replace(contract.rules[format], **slots)})  # type: ignore[arg-type]


def other_formats() -> dict[str, tuple[BlockFormat, contracts.Contract]]:
    nvfp4, mxfp4 = hb.get_format("nvfp4"), hb.get_format("mxfp4")
    modelopt, te, ct = contracts.modelopt(), contracts.transformer_engine(), contracts.compressed_tensors()
    return {
        "blocks of 8": (dataclasses.replace(nvfp4, block=8), te),
        "blocks of 48": (dataclasses.replace(nvfp4, block=48), te),
        "mxfp4 in blocks of 8": (dataclasses.replace(mxfp4, block=8), contracts.ocp()),
        "six bits": (dataclasses.replace(mxfp4, element=E3M2), contracts.ocp()),
        "six bits under e4m3": (dataclasses.replace(nvfp4, element=E3M2), te),
        "mxfp8 in blocks of 16": (dataclasses.replace(hb.get_format("mxfp8"), block=16), contracts.ocp()),
        "a new dividing formula": (nvfp4, with_rule(modelopt, "nvfp4", element=half_over)),
        "a new multiplying formula": (nvfp4, with_rule(modelopt, "nvfp4", element=times_twice)),
        "another zero-block byte": (nvfp4, with_rule(ct, "nvfp4", scale_byte=ScaleByte(for_zero_byte=0x28))),
        "another replacement of zero": (nvfp4, with_rule(modelopt, "nvfp4", scale_byte=ScaleByte(for_zero=2.0))),
        "ties that go up": (nvfp4, with_rule(te, "nvfp4", rounding=Rounding(tie="up"))),
        "formulas of two kinds": (nvfp4, with_rule(te, "nvfp4", element=expressions.over_scale_product)),
    }


@pytest.mark.parametrize("name", other_formats())
def test_what_no_kernel_was_written_for(name: str) -> None:
    format, contract = other_formats()[name]
    x = X.copy()
    x[1, :32] = 0
    expected = hb.quantize(x, format, contract, backend="reference")
    assert_same(hb.quantize(x, format, contract), expected)
    with pytest.raises(hb.UnsupportedError, match=r"^backend cpu cannot do this: .*; or choose backend='auto'$"):
        hb.quantize(x, format, contract, backend="cpu")


def test_subclasses_are_not_what_they_derive_from() -> None:
    class Bolder(hb.Optimal):
        """A method that no kernel knows."""

    class OtherRule(NVFP4Rule):
        """A rule that no kernel knows."""

    with pytest.raises(hb.UnsupportedError, match="no kernel was written for the method Bolder"):
        hb.quantize(X, "nvfp4", method=Bolder(), backend="cpu")
    te = contracts.transformer_engine()
    rule = te.rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    slots = {field.name: getattr(rule, field.name) for field in dataclasses.fields(rule)}
    other = dataclasses.replace(te, rules={"nvfp4": OtherRule(**slots)})
    with pytest.raises(hb.UnsupportedError, match="no kernel for rules of type OtherRule"):
        hb.quantize(X, "nvfp4", other, backend="cpu")


@pytest.mark.parametrize(("format", "scale"), [("nvfp4", "mxfp4"), ("mxfp4", "nvfp4")])
def test_a_rule_is_for_the_scales_it_was_written_for(format: str, scale: str) -> None:
    """Rules are found by the name of a format, but the name alone is not enough: the scale must fit too."""
    other = dataclasses.replace(hb.get_format(format), scale=hb.get_format(scale).scale)
    with pytest.raises(hb.UnsupportedError, match=f"scales for {format}, not "):
        hb.quantize(X, other, backend="reference")


def test_codes_cut_from_bits_are_those_of_e2m1() -> None:
    wide = dataclasses.replace(hb.get_format("nvfp4"), element=E3M2)
    with pytest.raises(hb.UnsupportedError, match="fouroversix defines method amax for e2m1, not e3m2"):
        hb.quantize(X, wide, contracts.fouroversix())


def test_an_exponent_rule_that_tables_do_not_know() -> None:
    """The rule steps down within a bucket of float32 amaxes, which the tables could not represent."""

    def sawtooth(v: F32, statistics: str, element: ElementFormat) -> tuple[U8, F32]:
        byte, scale = exponents.ocp_floor(v, statistics, element)
        odd = (v.view(np.uint32) & 0x100) != 0
        return np.where(odd, byte + 1, byte).astype(np.uint8), np.where(odd, 2 * scale, scale).astype(np.float32)

    ocp = contracts.ocp()
    rule = ocp.rules["mxfp4"]
    assert isinstance(rule, MXRule)
    contract = dataclasses.replace(ocp, rules={"mxfp4": dataclasses.replace(rule, scale=sawtooth)})
    assert_same(hb.quantize(X, "mxfp4", contract), hb.quantize(X, "mxfp4", contract, backend="reference"))
    with pytest.raises(hb.UnsupportedError, match="no kernel was written for the exponent rule sawtooth"):
        hb.quantize(X, "mxfp4", contract, backend="cpu")


def test_zero_blocks_whose_elements_are_not_numbers() -> None:
    """A scale byte of 0 under a dividing formula: 0/0 has a code of its own in the contract."""
    contract = with_rule(contracts.modelopt(), "nvfp4", rounding=Rounding(nan_code=2), scale_byte=ScaleByte())
    x = X.copy()
    x[0, :16] = 0
    for method in (hb.Amax(), hb.Optimal(), hb.Optimal(np.ones(96, np.float32))):
        expected = hb.quantize(x, "nvfp4", contract, method, backend="reference")
        assert expected.codes[0, 0] == 0x22
        assert_same(hb.quantize(x, "nvfp4", contract, method), expected)


def test_partials_are_flashinfers_with_a_usable_factor() -> None:
    rule = contracts.flashinfer().rules["mxfp4"]
    assert isinstance(rule, MXRule)
    factors: list[Any] = [np.float32(-1), np.float32(np.inf), np.float32(0), 1.5]
    for factor in factors:
        scale = functools.partial(ceil_bits_of_factor, factor=factor)
        contract = with_rule(contracts.flashinfer(), "mxfp4", scale=scale)
        with pytest.raises(hb.UnsupportedError, match="no kernel was written for the exponent rule"):
            hb.quantize(X, "mxfp4", contract, backend="cpu")


def test_a_format_that_counts_otherwise() -> None:
    class Wide(BlockFormat):
        """One code per byte, whatever its bits."""

        codes_per_byte = 1

    nvfp4 = hb.get_format("nvfp4")
    slots = {field.name: getattr(nvfp4, field.name) for field in dataclasses.fields(nvfp4)}
    with pytest.raises(hb.UnsupportedError, match="no kernel for formats of type Wide"):
        hb.quantize(X, Wide(**slots), backend="cpu")


def test_a_method_that_nothing_computes_is_refused() -> None:
    class Unwritten(Method):
        """Every contract should have it, but nobody wrote how."""

        name = "unwritten"
        everywhere = True

    for backend in ("auto", "reference", "cpu"):
        with pytest.raises(hb.UnsupportedError, match=r"unwritten has no entry|no kernel was written"):
            hb.quantize(X, "nvfp4", method=Unwritten(), backend=backend)


def main(first: int, last: int) -> None:
    """Run a range of seeds from the command line."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        counted: collections.Counter[str] = collections.Counter()
        for seed in range(first, last):
            invented = draw(seed)
            try:
                counted.update(answers(invented, monkeypatch))
            except Exception as error:
                raise AssertionError(str(invented)) from error
    print(dict(counted))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
