"""Every backend equals the reference bit for bit: contract × format × method × dtype × input × instruction set.

The reference is computed once for each input and compared with the kernels of every instruction set of this machine.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.backends.cpu.backend import Cpu
from halfbyte.backends.cpu.library import ISAS, load_library
from halfbyte.contracts.spec import NVFP4Rule
from halfbyte.formats import BlockFormat
from halfbyte.testing import assert_same_bits
from tests.backends.cases import (
    DTYPES,
    EXACT,
    INPUTS,
    METHODS,
    VARIANTS,
    Case,
    Matrix,
    every_case,
    fits,
    has_own_kernel,
    make_input,
    peer_cases,
    served_cases,
)
from tests.backends.ways import WAYS, way


def machine_isas() -> list[str]:
    """The instruction sets that this machine has."""
    library = load_library()
    best = -1 if library is None else int(library.hb_best_isa())
    return [name for name, number in ISAS.items() if number <= best]


CASES = served_cases()
SEARCHES = [
    pytest.param(case, dtype, id=f"{case}-{dtype}")
    for dtype in DTYPES
    for case in served_cases(dtype)
    if case.method in EXACT and has_own_kernel(case, dtype)
]
"""Searches with a specialised kernel; test_peer_searches.py tests the others."""
ELEMENTWISE = [case for case in CASES if case.method not in EXACT and "sweep" not in case.method]
ISA_NAMES = machine_isas()

SEARCHED_INPUTS = ["gauss", "block scales", "ties", "bits in range", "zero blocks", "odd", "single block"]
"""Inputs for searches, whose reference is slow: those that the kernels serve. transformer_engine gets every input."""
HESSIAN_INPUTS = ["block scales", "ties", "bits in range", "single block"]
"""Inputs for the slowest searches: Hessians, and the 255 scales of the MX formats."""


each_isa = pytest.mark.parametrize("isa", ISA_NAMES, indirect=True)
"""This decorator comes first, so that it varies fastest and all instruction sets share one computed reference."""


@pytest.fixture
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each instruction set in turn."""
    monkeypatch.setenv("HALFBYTE_ISA", request.param)
    return str(request.param)


@functools.cache
def expected(case: Case, name: str, dtype: str) -> hb.QuantizedTensor:
    return case.quantize(make_input(name, dtype), "reference")


def assert_same(got: hb.QuantizedTensor, wanted: hb.QuantizedTensor, x: Matrix, where: str) -> None:
    """Compare all four parts bit for bit."""
    assert got.shape == wanted.shape
    for part in ("codes", "scales", "stored_scale", "global_scale"):
        a, b = getattr(got, part), getattr(wanted, part)
        assert (a is None) == (b is None), f"{where}: {part}"
        if b is not None:
            try:
                assert_same_bits(a, b, inputs=x if part in ("codes", "scales") else None)
            except AssertionError as error:
                raise AssertionError(f"{where}: {part}: {error}") from None


def ways_on_this_isa() -> tuple[str, ...]:
    """All ways on the best instruction set; on the others tables alone, because formulas use no instructions of one."""
    return WAYS if os.environ["HALFBYTE_ISA"] == ISA_NAMES[-1] else ("by tables",)


def check(case: Case, dtype: str, names: list[str], least: int = 4) -> None:
    compared = 0
    for name in names:
        x = make_input(name, dtype)
        if not fits(case, x):
            continue
        for taken in ways_on_this_isa():
            with way(taken):
                got = case.quantize(x, "cpu")
            assert_same(got, expected(case, name, dtype), x, f"input {name!r}, {taken}")
        compared += 1
    assert compared >= least


# --- what is compared ---


def test_the_portable_kernels_and_the_best_ones_are_compared() -> None:
    library = load_library()
    assert library is not None, "the compiled kernels are missing: nothing would be compared"
    assert ISA_NAMES[0] == "portable"
    assert ISAS[ISA_NAMES[-1]] == library.hb_best_isa()


def test_every_contract_is_in_the_matrix() -> None:
    assert {contract.name for contract in VARIANTS} == set(contracts.CONTRACTS)


def test_the_kernels_serve_everything() -> None:
    for dtype in DTYPES:
        cases = every_case() + peer_cases()
        assert {str(case): Cpu().supports(case.request(dtype)) for case in cases} == {str(case): None for case in cases}
        assert len(cases) > 400


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        (hb.Optimal(np.ones(96)), "qwantize's search knows no weights"),
        (METHODS["descent"](96), "qwantize's search has no codes='descent'"),
    ],
)
def test_what_a_peer_does_not_have_is_refused_with_a_reason(method: hb.methods.Method, reason: str) -> None:
    for backend in ("cpu", "reference"):
        with pytest.raises(hb.UnsupportedError, match=reason):
            hb.quantize(
                make_input("gauss", "fp32"), "nvfp4", contracts.qwantize(mode="nvfp4/optimal"), method, backend=backend
            )


# --- quantize ---


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ELEMENTWISE, ids=str)
def test_elementwise_methods_give_the_bits_of_the_reference(case: Case, dtype: str, isa: str) -> None:
    names = list(INPUTS)
    if case.block == 32 and case.format == "nvfp4" and case.method != "amax":  # the same arithmetic as in blocks of 16
        names = [*SEARCHED_INPUTS, "wide in range", "nonfinite", "2**61", "zeros"]
    check(case, dtype, names)


@each_isa
@pytest.mark.parametrize(("case", "dtype"), SEARCHES)
def test_exact_searches_give_the_bits_of_the_reference(case: Case, dtype: str, isa: str) -> None:
    names = HESSIAN_INPUTS if case.method in ("hessian", "descent") or case.format != "nvfp4" else SEARCHED_INPUTS
    if case.contract == contracts.transformer_engine() and (dtype == "fp32" or case.method == "optimal"):
        names = list(INPUTS)
    check(case, dtype, names)


# --- a global amax that is given ---

AMAXES = [1e6, 0.25, 1e-10, 1e-17, 2.0**-60, 1e-30, 1e-42, 0.0, 2.0**60, 3e38, np.inf]
"""Amaxes above and below the tensor's own, far away from it, and zero."""
FEW_AMAXES = [1e6, 0.25, 1e-30, 0.0]
"""For a Hessian, where the reference takes seconds for each: two that a kernel serves, two that the reference serves."""


def takes_global_amax(case: Case) -> bool:
    rule = case.contract.rules[case.format]
    if not isinstance(rule, NVFP4Rule) or rule.stored is None or rule.constant_factor is not None:
        return False
    if case.method in EXACT:  # slow references: one contract that multiplies elements, one that divides them
        divides = case.contract == contracts.modelopt() and case.method == "weighted"
        return divides or case.contract == contracts.transformer_engine()
    return case.method in ("amax", "mae 448", "mse 256 fast")


@functools.cache
def expected_with_amax(case: Case, name: str, dtype: str, amax: float) -> hb.QuantizedTensor:
    return case.quantize(make_input(name, dtype), "reference", amax_for(case, name, dtype, amax))


def amax_for(case: Case, name: str, dtype: str, amax: float) -> object:
    """One amax, or one per row; in the latter case every second row keeps an amax near its own."""
    rows = make_input(name, dtype).shape[0]
    return np.where(np.arange(rows) % 2, 3.5, amax).astype(np.float32) if case.scaling == "row" else np.float32(amax)


@each_isa
@pytest.mark.parametrize("case", [case for case in CASES if takes_global_amax(case)], ids=str)
def test_a_given_amax_gives_the_bits_of_the_reference(case: Case, isa: str) -> None:
    names = ["gauss", "block scales", "nonfinite"] if case.method not in EXACT else ["block scales"]
    for name in names:
        for dtype in ("fp32", "bf16") if case.method not in EXACT else ("fp32",):
            for amax in FEW_AMAXES if case.method in ("hessian", "descent") else AMAXES:
                x, given = make_input(name, dtype), amax_for(case, name, dtype, amax)
                given = given if case.scaling == "row" else float(amax)
                wanted = expected_with_amax(case, name, dtype, amax)
                for taken in ways_on_this_isa():
                    with way(taken):
                        got = case.quantize(x, "cpu", given)
                    assert_same(got, wanted, x, f"input {name!r} {dtype}, global_amax {amax}, {taken}")


# --- dequantize ---

STORED = [1.0, 21.0, 2.0**-11, 1e-40, 0.0, 3e38, np.inf, np.nan]


def every_byte_and_code(format: BlockFormat) -> tuple[Matrix, Matrix]:
    """Codes and scales with every combination of scale byte (one per row), code, and nibble."""
    codes = 1 << format.element.bits
    row = np.arange(codes * (16 if format.codes_per_byte == 2 else 1))
    row = np.stack([row % codes, row // codes], axis=-1).reshape(-1) if format.codes_per_byte == 2 else row
    packed = row[0::2] | row[1::2] << 4 if format.codes_per_byte == 2 else row
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(row.size // format.block, axis=1)
    return np.tile(packed.astype(np.uint8), (256, 1)), scales


DECODED = {
    f"{contract}-{name}-{block}": (contract, hb.get_format(name, block))
    for contract in VARIANTS
    for name in contract.rules
    for block in hb.get_format(name).blocks
}


@each_isa
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", DECODED)
def test_every_code_under_every_scale_decodes_to_the_bits_of_the_reference(name: str, dtype: str, isa: str) -> None:
    contract, format = DECODED[name]
    codes, scales = every_byte_and_code(format)
    rule = contract.rules[format.name]
    has_stored = isinstance(rule, NVFP4Rule) and rule.stored is not None
    methods: list[hb.methods.Method] = [hb.Amax()]
    if isinstance(rule, NVFP4Rule) and rule.four_six is not None:
        methods.append(hb.FourSix(e4m3_max=256))  # divides by another number
    for stored in STORED if has_stored else [None]:
        for method in methods:
            scale = None if stored is None else np.array(stored, np.float32)
            shape = (256, codes.shape[1] * format.codes_per_byte)
            q = hb.QuantizedTensor(format, shape, codes, scales, None, scale, contract, method)
            got, wanted = (to_numpy(hb.dequantize(q, dtype, backend)) for backend in ("cpu", "reference"))
            if format.name == "mxfp8":  # NaN times NaN: IEEE leaves the result's bits open, and numpy's loops differ
                assert_same_bits(got[255, [127, 255]], wanted[255, [127, 255]], any_nan=True)
                got[255, [127, 255]] = wanted[255, [127, 255]]
            assert_same_bits(got, wanted)
            for start in range(0, 128, 8):  # a call goes the long way if one of its values is not finite
                few = slice(start, start + 8)
                part = dataclasses.replace(q, shape=(8, shape[1]), codes=codes[few], scales=scales[few])
                assert_same_bits(to_numpy(hb.dequantize(part, dtype, "cpu")), wanted[few])


@each_isa
@pytest.mark.parametrize("case", [case for case in CASES if case.method == "amax"], ids=str)
def test_what_was_quantized_decodes_to_the_bits_of_the_reference(case: Case, isa: str) -> None:
    for name in ("ragged", "odd", "narrow", "one element", "single block", "gauss"):
        x = make_input(name, "bf16")
        for dtype in ("float32", "float16", "bfloat16") if fits(case, x) else ():
            q = expected(case, name, "bf16")
            assert_same_bits(hb.dequantize(q, dtype, "cpu"), hb.dequantize(q, dtype, "reference"))


@each_isa
@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_output_that_goes_past_the_caches_has_the_bits_of_its_parts(dtype: str, format: str, isa: str) -> None:
    x = np.resize(make_input("block scales", "bf16"), (1100, 4096))  # 9 MB in 16 bits
    q = hb.quantize(x, format, backend="cpu")
    parts = [hb.quantize(part, format, backend="cpu", **amax_of(x, format)) for part in np.array_split(x, 4)]
    wanted = np.concatenate([to_numpy(hb.dequantize(part, dtype, "cpu")) for part in parts])
    assert_same_bits(to_numpy(hb.dequantize(q, dtype, "cpu")), wanted)
    room = np.empty(x.size + 1, wanted.dtype)[1:].reshape(x.shape)  # not on a multiple of sixteen bytes
    assert_same_bits(to_numpy(hb.dequantize(q, dtype, "cpu", out=room)), wanted)


def amax_of(x: Matrix, format: str) -> dict[str, Any]:
    return {"global_amax": float(np.abs(x.astype(np.float32)).max())} if format == "nvfp4" else {}


def test_labels_are_in_the_order_of_the_methods() -> None:
    assert [METHODS[label](16) for label in list(METHODS)[1:9]] == [
        hb.FourSix(error, top, fast) for error in ("mae", "mse") for top in (448, 256) for fast in (False, True)
    ]
