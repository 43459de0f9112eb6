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
from halfbyte.contracts import Contract
from halfbyte.layouts.swizzle import swizzle
from halfbyte.methods import Method
from halfbyte.testing import assert_same_bits, find_difference
from tests.backends.cases import FOUR_SIX, INPUTS, Matrix, make_input
from tests.backends.gpu.cuda_host import OnCpu, build

TE = contracts.transformer_engine()
METHODS: list[Method] = [*FOUR_SIX, hb.Optimal()]
NVFP4 = hb.get_format("nvfp4")
NEAR_TIES = (1024, 2048)
"""Enough normal numbers that some blocks' errors lie closer together than the tables are exact."""


@functools.cache
def kernel(name: str, *definitions: str) -> OnCpu:
    return build(name, *definitions)


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
    request = Request(NVFP4, contract, method, (1, 16), "tensor", "bf16")
    name = "optimal" if isinstance(method, hb.Optimal) else "four_six"
    used = kernel(name) if definition is None else kernel(name, definition)
    codes, scales, exact = used.quantize(x, request, swizzled, amax=given)
    return codes, scales, exact / (x.size // 16)


def compare(x: Matrix, method: Method, amax: float | None = None, backend: str = "reference") -> float:
    expected = hb.quantize(x, "nvfp4", TE, method, global_amax=amax, backend=backend)
    codes, scales, share = run(x, method, TE, amax)
    assert_same_bits(scales, to_numpy(expected.scales))
    assert_same_bits(codes, to_numpy(expected.codes))
    return share


def draw(kind: str, shape: tuple[int, int], seed: int = 0) -> Matrix:
    generator = np.random.default_rng(seed)
    made = {
        "normal": lambda: generator.standard_normal(shape),
        "heavy tails": lambda: generator.standard_t(2, shape),
        "uniform": lambda: generator.uniform(-3, 3, shape),
        "few values": lambda: generator.integers(-6, 7, shape) / 4,
        "sparse": lambda: generator.standard_normal(shape) * (generator.random(shape) < 0.1),
    }
    return made[kind]().astype(ml_dtypes.bfloat16)


def whole_blocks() -> Iterator[str]:
    return (name for name in INPUTS if make_input(name, "bf16").shape[1] % 16 == 0)


@pytest.mark.parametrize("method", METHODS, ids=str)
def test_every_input_equals_the_reference(method: Method) -> None:
    for name in whole_blocks():
        compare(np.array(make_input(name, "bf16")), method)


@pytest.mark.parametrize("method", METHODS, ids=str)
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "uniform", "few values", "sparse"])
def test_larger_matrices(kind: str, method: Method) -> None:
    """With the amax of the data, and with one that most blocks exceed or stay far below."""
    x = draw(kind, (256, 1024))
    largest = float(np.abs(x.astype(np.float32)).max())
    for amax in (None, largest / 3, largest * 1.9, largest * 3000):
        compare(x, method, amax, "cpu")


@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), hb.Optimal()], ids=str)
def test_every_significand_of_the_amax(method: Method) -> None:
    """Tables follow from the tensor's amax: its 128 significands, in octaves that go through the whole range."""
    x = draw("normal", (16, 256), 3)
    for index in range(128):
        scaled = np.ldexp(x.astype(np.float32), index - 64).astype(ml_dtypes.bfloat16)
        amax = np.ldexp(np.float32(3 + 3 * index / 128), index - 64)
        compare(scaled, method, float(amax), "cpu")


@pytest.mark.parametrize("kind", ["normal", "heavy tails"])
def test_tables_decide_nearly_all_blocks(kind: str) -> None:
    x = draw(kind, (512, 1024))
    assert compare(x, hb.Optimal(), backend="cpu") < 0.03
    assert max(compare(x, method, backend="cpu") for method in FOUR_SIX) < 0.005


@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 448), hb.Optimal()], ids=str)
def test_without_the_margin_bits_would_differ(method: Method) -> None:
    x = draw("normal", NEAR_TIES, 1)
    expected = to_numpy(hb.quantize(x, "nvfp4", TE, method, backend="cpu").scales)
    assert_same_bits(run(x, method)[1], expected)
    assert find_difference(run(x, method, definition="-DMARGIN_UNITS=0")[1], expected) is not None


@pytest.mark.parametrize(
    ("contract", "method"),
    [
        (contracts.miles(), hb.FourSix("mse", 256)),
        (contracts.miles(), hb.Optimal()),
        (contracts.flashinfer(mode="4over6"), hb.FourSix("mae", 448)),
        (contracts.flashinfer(mode="te"), hb.Optimal()),
    ],
    ids=str,
)
def test_other_contracts_with_the_same_formulas(contract: Contract, method: Method) -> None:
    x = draw("normal", (32, 256), 5)
    codes, scales, _ = run(x, method, contract)
    expected = hb.quantize(x, "nvfp4", contract, method, backend="reference")
    assert_same_bits(scales, to_numpy(expected.scales))
    assert_same_bits(codes, to_numpy(expected.codes))


def test_two_copies_of_the_rows() -> None:
    x = draw("normal", (64, 512), 6)
    plain = run(x, hb.Optimal())
    for mine, wanted in zip(run(x, hb.Optimal(), definition="-DCOPIES=2")[:2], plain[:2], strict=True):
        assert_same_bits(mine, wanted)


@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.Optimal()], ids=str)
def test_strided_rows_and_tiles_of_scales(method: Method) -> None:
    wide = draw("normal", (150, 512), 7)
    for x in (wide[:, :208], wide[::3, :16], wide[:, 64:]):
        plain = np.ascontiguousarray(x)
        codes, scales, _ = run(plain, method)
        assert_same_bits(run(x, method)[0], codes)
        assert_same_bits(run(x, method)[1], scales)
        assert_same_bits(run(x, method, swizzled=True)[1], swizzle(scales))


@pytest.mark.parametrize("method", [hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), hb.Optimal()], ids=str)
def test_groups_with_a_scale_each(method: Method) -> None:
    """Several groups of rows, and separate tensors: each gives what it gives alone."""
    request = Request(NVFP4, TE, method, (1, 16), "tensor", "bf16")
    used = kernel("optimal" if isinstance(method, hb.Optimal) else "four_six")
    x = np.ldexp(draw("normal", (24, 64), 9).astype(np.float32), np.arange(24)[:, None] // 6 * 7 - 3)
    x = x.astype(ml_dtypes.bfloat16)
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
