"""Searches that screen with fused operations and decide with the objective, on inputs with many near ties.

In sparse blocks, small integers and repeated values, several scales have equal or nearly equal errors. Without the
margin of the screening, about one in a hundred of these blocks would get another scale.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.testing import assert_same_bits
from tests.backends.cases import DTYPES, METHODS, Matrix
from tests.backends.test_bits import each_isa, isa

__all__ = ["isa"]  # the fixture

SHAPE = (136, 256)
GENERATOR = np.random.default_rng(11)

NEAR_TIES: dict[str, Callable[[], Matrix]] = {
    "small integers": lambda: GENERATOR.integers(-8, 9, SHAPE),
    "sparse": lambda: np.where(GENERATOR.random(SHAPE) < 0.9, 0, GENERATOR.normal(size=SHAPE)),
    "repeated": lambda: np.repeat(GENERATOR.normal(size=(SHAPE[0], SHAPE[1] // 4)), 4, axis=1),
    "few values": lambda: GENERATOR.integers(1, 4, SHAPE) * 2.0 ** GENERATOR.integers(-3, 3, SHAPE),
}
DATA = {name: make() for name, make in NEAR_TIES.items()}


@functools.cache
def near_ties(name: str, method: str, dtype: str) -> tuple[Matrix, hb.QuantizedTensor]:
    """The operand, and what the reference makes of it: once for all instruction sets."""
    x = DATA[name].astype(DTYPES[dtype])[: 16 if method == "hessian" else None]
    return x, hb.quantize(x, "nvfp4", method=METHODS[method](SHAPE[1]), backend="reference")


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["mae 448", "mse 256", "optimal", "weighted", "hessian"])
@pytest.mark.parametrize("name", DATA)
def test_near_ties_are_decided_as_the_reference_decides(name: str, method: str, dtype: str, isa: str) -> None:
    x, wanted = near_ties(name, method, dtype)
    got = hb.quantize(x, "nvfp4", method=METHODS[method](SHAPE[1]), backend="cpu")
    assert_same_bits(got.scales, wanted.scales, inputs=x)
    assert_same_bits(got.codes, wanted.codes, inputs=x)


AMAXES = {"its own": 1.0, "smaller": 0.2, "larger": 40.0, "so large that scales are subnormal": 1e5}
"""Multiples of the tensor's amax: block scales reach the largest one, exceed it, or are far below it."""


@functools.cache
def many_octaves(name: str, amax: str) -> tuple[Matrix, float, hb.QuantizedTensor]:
    """The operand, an amax, and what the reference makes of them: once for all instruction sets."""
    generator = np.random.default_rng(5)
    scale = 2.0 ** generator.uniform(-9, 0, (SHAPE[0], SHAPE[1] // 16, 1))
    x = (generator.standard_t(4, (SHAPE[0], SHAPE[1] // 16, 16)) * scale).reshape(SHAPE).astype(DTYPES["bf16"])
    x[::16, ::64] = 0
    x[5, :16] = 0
    x[6, 3] = 1e-39
    given = float(np.abs(x.astype(np.float32)).max()) * AMAXES[amax]
    return x, given, hb.quantize(x, "nvfp4", name, "optimal", global_amax=given, backend="reference")


@each_isa
@pytest.mark.parametrize("amax", AMAXES)
@pytest.mark.parametrize("name", ["transformer_engine", "modelopt", "compressed_tensors", "torchao"])
def test_squared_errors_by_look_up_lead_to_the_scales_of_the_reference(name: str, amax: str, isa: str) -> None:
    """Every octave of amaxes and magnitudes, and numbers without a row in the table: zeros and subnormals."""
    x, given, wanted = many_octaves(name, amax)
    got = hb.quantize(x, "nvfp4", name, "optimal", global_amax=given, backend="cpu")
    assert_same_bits(got.scales, wanted.scales, inputs=x)
    assert_same_bits(got.codes, wanted.codes, inputs=x)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("label", ["weighted", "hessian", "descent"])
def test_methods_that_live_side_by_side_keep_their_own_numbers(label: str, format: str) -> None:
    """Backends cache what they derive from the arrays of a method, separately for each method."""
    x = DATA["repeated"].astype(np.float32)[:4]
    block = hb.get_format(format).block
    generator = np.random.default_rng(3)
    width = SHAPE[1]
    methods: list[hb.Optimal | hb.Hessian] = []
    for _ in range(3):
        if label == "weighted":
            methods.append(hb.Optimal(generator.exponential(size=width) ** 3))
        else:
            h = hb.hessian_from_activations(generator.normal(size=(40, 5)) @ generator.normal(size=(5, width)), block)
            methods.append(hb.Hessian(h, codes="descent" if label == "descent" else "nearest"))
    found = [hb.quantize(x, format, method=method, backend="cpu") for method in methods]
    for got, method in zip(found, methods, strict=True):
        wanted = hb.quantize(x, format, method=method, backend="reference")
        assert_same_bits(got.scales, wanted.scales, inputs=x)
        assert_same_bits(got.codes, wanted.codes, inputs=x)
    assert not np.array_equal(found[0].scales, found[1].scales)
