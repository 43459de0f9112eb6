"""The CUDA kernels' own source, run on the CPU, against the reference; and that their margins are needed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.backends import Request
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.codec.bits import dtype_name
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.layouts.swizzle import swizzle
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits, find_difference
from tests.backends.cases import FOUR_SIX, INPUTS, VARIANTS, Matrix, make_input
from tests.backends.gpu.cuda_host import OnCpu, build

TE = contracts.transformer_engine()
OPTIMAL = hb.Optimal(headroom=1)
"""The tensor scale of the amax: what these kernels are told. Others choose the headroom before they run."""
METHODS: list[Method] = [*FOUR_SIX, OPTIMAL]
NVFP4 = hb.get_format("nvfp4")
DTYPES = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16, "fp32": np.float32}
SHARE = {"bf16": 0.03, "fp16": 0.13, "fp32": 0.03}
"""The search: blocks of ordinary data that are left to exact arithmetic."""
NEAR_TIES = (1024, 2048)
"""Enough numbers that some blocks' errors lie closer together than tables and estimates are exact."""


def searched(contract: Contract) -> bool:
    """Whether a contract has an exact search over NVFP4's scales, of the operand as it is."""
    return isinstance(contract.rules.get("nvfp4"), NVFP4Rule) and not contract.transform.columnwise


CONTRACTS = [contract for contract in VARIANTS if searched(contract)]


@functools.cache
def kernel(name: str, dtype: str, *definitions: str) -> OnCpu:
    return build(name, dtype, *definitions)


def request_for(x: Matrix, method: Method, contract: Contract) -> Request:
    return Request(NVFP4, contract, method, (1, 16), "tensor", dtype_name(x.dtype))


def serving(request: Request) -> str:
    """The name of the CUDA kernel that serves a request."""
    chosen = choose(request)
    assert isinstance(chosen, ChosenKernel)
    assert chosen.table is not None
    return chosen.table


def run(
    x: Matrix,
    method: Method,
    contract: Contract = TE,
    amax: float | None = None,
    definition: str | None = None,
    swizzled: bool = False,
) -> tuple[Matrix, Matrix, float]:
    """Codes, scale bytes, share of blocks that were left to exact arithmetic."""
    given = None if amax is None else np.array(amax, np.float32)
    request = request_for(x, method, contract)
    used = kernel(serving(request), request.dtype, *([] if definition is None else [definition]))
    codes, scales, exact = used.quantize(x, request, swizzled, amax=given)
    return codes, scales, exact / (x.size // 16)


def compare(
    x: Matrix, method: Method, amax: float | None = None, backend: str = "reference", contract: Contract = TE
) -> float:
    expected = hb.quantize(x, "nvfp4", contract, method, global_amax=amax, scaling="tensor", backend=backend)
    codes, scales, share = run(x, method, contract, amax)
    assert_same_bits(scales, to_numpy(expected.scales))
    assert_same_bits(codes, to_numpy(expected.codes))
    return share


def draw(kind: str, shape: tuple[int, int], seed: int = 0, dtype: str = "bf16") -> Matrix:
    generator = np.random.default_rng(seed)
    made = {
        "normal": lambda: generator.standard_normal(shape),
        "heavy tails": lambda: generator.standard_t(2, shape),
        "uniform": lambda: generator.uniform(-3, 3, shape),
        "few values": lambda: generator.integers(-6, 7, shape) / 4,
        "sparse": lambda: generator.standard_normal(shape) * (generator.random(shape) < 0.1),
    }
    return made[kind]().astype(DTYPES[dtype])


def whole_blocks() -> Iterator[str]:
    return (name for name in INPUTS if make_input(name, "bf16").shape[1] % 16 == 0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_input_equals_the_reference(method: Method, dtype: str) -> None:
    for name in whole_blocks():
        compare(np.array(make_input(name, dtype)), method)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contract", CONTRACTS, ids=repr)
def test_the_search_under_every_contract(contract: Contract, dtype: str) -> None:
    """Odd inputs, and matrices whose blocks the estimates decide for the most part."""
    for name in whole_blocks():
        compare(np.array(make_input(name, dtype)), OPTIMAL, backend="cpu", contract=contract)
    for seed, kind in enumerate(["normal", "heavy tails", "few values", "sparse"]):
        x = draw(kind, (64, 256), seed, dtype)
        share = compare(x, OPTIMAL, backend="cpu", contract=contract)
        expects_estimates = kind == "normal" and contract != contracts.vllm(global_scale=3e30)
        assert share < (SHARE[dtype] if expects_estimates else 1.1)


def choose_table(contract: Contract, dtype: str) -> str | None:
    chosen = choose(Request(NVFP4, contract, OPTIMAL, (1, 16), "tensor", dtype))
    assert isinstance(chosen, ChosenKernel)
    return chosen.table


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("contract", [contracts.modelopt(), contracts.compressed_tensors()], ids=repr)
def test_quotients_that_are_ties(contract: Contract, dtype: str) -> None:
    """Scales that are powers of two times few numbers: many quotients lie exactly between two values."""
    generator = np.random.default_rng(8)
    x = (generator.integers(-96, 97, (128, 256)) / 8).astype(DTYPES[dtype])
    for amax in (2688.0, 1344.0, 21.0, 12.0):
        compare(x, OPTIMAL, amax, "cpu", contract)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uniform", "few values", "sparse"])
def test_larger_matrices(kind: str, method: Method, dtype: str) -> None:
    """With the amax of the data, and with one that most blocks exceed or stay far below."""
    x = draw(kind, (256, 1024) if dtype == "bf16" else (128, 512), dtype=dtype)
    largest = float(np.abs(x.astype(np.float32)).max())
    for amax in (None, largest / 3, largest * 1.9, largest * 3000):
        compare(x, method, amax, "cpu")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), OPTIMAL], ids=str)
def test_every_significand_of_the_amax(method: Method, dtype: str) -> None:
    """Tables follow from the tensor's amax: its 128 significands, in octaves that go through the whole range."""
    x = draw("normal", (16, 256), 3)
    for index in range(128):
        scaled = np.ldexp(x.astype(np.float32), index - 64).astype(DTYPES[dtype])
        amax = np.ldexp(np.float32(3 + 3 * index / 128), index - 64)
        compare(scaled, method, float(amax), "cpu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_nearly_all_blocks_are_decided(kind: str, dtype: str) -> None:
    x = draw(kind, (512, 1024), dtype=dtype)
    assert compare(x, OPTIMAL, backend="cpu") < SHARE[dtype]
    assert max(compare(x, method, backend="cpu") for method in FOUR_SIX) < 0.005


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 448), OPTIMAL], ids=str)
def test_without_the_margin_bits_would_differ(method: Method, dtype: str) -> None:
    x = draw("normal" if dtype == "bf16" else "few values", NEAR_TIES, 1, dtype)
    expected = to_numpy(hb.quantize(x, "nvfp4", TE, method, backend="cpu").scales)
    assert_same_bits(run(x, method)[1], expected)
    assert find_difference(run(x, method, definition="-DMARGIN_UNITS=0")[1], expected) is not None


@pytest.mark.parametrize(
    ("contract", "method"),
    [(contracts.miles(), hb.FourSix("mse", 256)), (contracts.flashinfer(mode="4over6"), hb.FourSix("mae", 448))],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_4over6_of_other_contracts_with_the_same_formulas(contract: Contract, method: Method, dtype: str) -> None:
    compare(draw("normal", (32, 256), 5, dtype), method, contract=contract)


def test_two_copies_of_the_rows() -> None:
    x = draw("normal", (64, 512), 6)
    plain = run(x, OPTIMAL)
    for mine, wanted in zip(run(x, OPTIMAL, definition="-DCOPIES=2")[:2], plain[:2], strict=True):
        assert_same_bits(mine, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), OPTIMAL], ids=str)
def test_strided_rows_and_tiles_of_scales(method: Method, dtype: str) -> None:
    wide = draw("normal", (150, 512), 7, dtype)
    for x in (wide[:, :208], wide[::3, :16], wide[:, 64:]):
        plain = np.ascontiguousarray(x)
        codes, scales, _ = run(plain, method)
        assert_same_bits(run(x, method)[0], codes)
        assert_same_bits(run(x, method)[1], scales)
        assert_same_bits(run(x, method, swizzled=True)[1], swizzle(scales))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), OPTIMAL], ids=str)
def test_groups_with_a_scale_each(method: Method, dtype: str) -> None:
    """Several groups of rows, and separate tensors: each gives what it gives alone."""
    x = np.ldexp(draw("normal", (24, 64), 9).astype(np.float32), np.arange(24)[:, None] // 6 * 4 - 3)
    x = x.astype(DTYPES[dtype])
    request = request_for(x, method, TE)
    used = kernel(serving(request), dtype)
    x[6:12] = 0
    for given in (x, x[:, :48]):
        codes, scales, _ = used.quantize(given, request, group_rows=6)
        for start in range(0, 24, 6):
            expected = hb.quantize(given[start : start + 6], "nvfp4", TE, method, backend="reference")
            assert_same_bits(codes[start : start + 6], to_numpy(expected.codes))
            assert_same_bits(scales[start : start + 6], to_numpy(expected.scales))
    parts = [x[:1, :16].copy(), x[1:20].copy(), x[20:23].copy(), x[23:].copy()]
    codes, scales = used.quantize_list(parts, request)
    alone = [hb.quantize(part, "nvfp4", TE, method, backend="reference") for part in parts]
    assert_same_bits(codes, np.concatenate([to_numpy(q.codes).reshape(-1) for q in alone]))
    assert_same_bits(scales, np.concatenate([to_numpy(q.scales).reshape(-1) for q in alone]))
