"""The float32 expressions: each equals the same formula on scalars, and differs from similar formulas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from halfbyte.codec.bits import FLOAT32_MAX
from halfbyte.contracts import expressions as ex
from halfbyte.contracts.spec import TensorScale
from halfbyte.testing import assert_same_bits
from tests.samples import F32, f32

f = np.float32
C = f(2688)
SIXTH = f(0.16666667163372039794921875)  # 0x3e2aaaab

N = 4000
RNG = np.random.default_rng(7)


def positive(low: int = -20, high: int = 20) -> F32:
    return (RNG.uniform(1, 2, N) * 2.0 ** RNG.integers(low, high, N)).astype(np.float32)


A, V, X, G = positive(), positive(), positive(), positive()
S = RNG.integers(1, 127, N).astype(np.float32)
Q = RNG.choice(np.array([0.5, 1, 1.5, 2, 3, 4, 6], np.float32), N)
T = TensorScale(amax=A, factor=G, largest=f(6), top=C, statistics="fp32")

# name → (function on arrays, the formula on scalars a, v, x, g, s, q)
Scalar = Callable[[Any, Any, Any, Any, Any, Any], Any]
FORMULAS: dict[str, tuple[Callable[[], F32], Scalar]] = {
    "clamped_ratio": (lambda: ex.clamped_ratio(A, C, "fp32"), lambda a, v, x, g, s, q: f(C / a)),
    "ratio": (lambda: ex.ratio(A, C, "fp32"), lambda a, v, x, g, s, q: f(C / a)),
    "reciprocal_product": (lambda: ex.reciprocal_product(A, C, "fp32"), lambda a, v, x, g, s, q: f(f(f(1) / a) * C)),
    "reciprocal_product_or_max": (
        lambda: ex.reciprocal_product_or_max(A, C, "fp32"),
        lambda a, v, x, g, s, q: f(f(f(1) / a) * C),
    ),
    "reciprocal_product_in_statistics": (
        lambda: ex.reciprocal_product_in_statistics(A, C, "fp32"),
        lambda a, v, x, g, s, q: f(f(f(1) / a) * C),
    ),
    "quotient": (lambda: ex.quotient(A, C, "fp32"), lambda a, v, x, g, s, q: f(a / C)),
    "no_factor": (lambda: ex.no_factor(A, C, "fp32"), lambda a, v, x, g, s, q: f(1)),
    "folded_sixth": (lambda: ex.folded_sixth(V, T), lambda a, v, x, g, s, q: f(v * f(g * SIXTH))),
    "sixth_then_factor": (lambda: ex.sixth_then_factor(V, T), lambda a, v, x, g, s, q: f(g * f(v * SIXTH))),
    "divided_then_factor": (lambda: ex.divided_then_factor(V, T), lambda a, v, x, g, s, q: f(f(v / f(6)) * g)),
    "divided_then_factor_or_zero": (
        lambda: ex.divided_then_factor_or_zero(V, T),
        lambda a, v, x, g, s, q: f(f(v / f(6)) * g),
    ),
    "over_product": (lambda: ex.over_product(V, T), lambda a, v, x, g, s, q: f(v / f(f(6) * g))),
    "factor_times_divided": (lambda: ex.factor_times_divided(V, T), lambda a, v, x, g, s, q: f(g * f(v / f(6)))),
    "divided_twice": (lambda: ex.divided_twice(V, T), lambda a, v, x, g, s, q: f(f(v / f(6)) / g)),
    "divided": (lambda: ex.divided(V, T), lambda a, v, x, g, s, q: f(v / f(6))),
    "static_scale": (
        lambda: ex.static_scale(V, T),
        lambda a, v, x, g, s, q: f(f(f(v / f(6)) * f(448)) / f(a / f(6))),
    ),
    "times_clamped_reciprocal": (
        lambda: ex.times_clamped_reciprocal(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(1) / f(s * f(f(1) / g)))),
    ),
    "times_reciprocal_or_zero": (
        lambda: ex.times_reciprocal_or_zero(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(1) / f(f(f(1) / g) * s))),
    ),
    "over_scale_product": (lambda: ex.over_scale_product(X, S, T), lambda a, v, x, g, s, q: f(x / f(s * g))),
    "over_scale_quotient": (lambda: ex.over_scale_quotient(X, S, T), lambda a, v, x, g, s, q: f(x / f(s / g))),
    "times_reciprocal_over_scale": (
        lambda: ex.times_reciprocal_over_scale(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(f(1) / g) / s)),
    ),
    "times_reciprocal_of_scale": (
        lambda: ex.times_reciprocal_of_scale(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(1) / s)),
    ),
    "over_scale": (lambda: ex.over_scale(X, S, T), lambda a, v, x, g, s, q: f(x / s)),
    "times_reciprocal_zeroed": (
        lambda: ex.times_reciprocal_zeroed(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(1) / f(s * f(f(1) / g)))),
    ),
    "times_reciprocal_shrunk": (
        lambda: ex.times_reciprocal_shrunk(X, S, T),
        lambda a, v, x, g, s, q: f(x * f(f(1) / f(s * f(f(1) / g)))),
    ),
    "store_reciprocal": (lambda: ex.store_reciprocal(T), lambda a, v, x, g, s, q: f(f(1) / g)),
    "store_reciprocal_or_zero": (lambda: ex.store_reciprocal_or_zero(T), lambda a, v, x, g, s, q: f(f(1) / g)),
    "amax_over_top": (lambda: ex.amax_over_top(A, C), lambda a, v, x, g, s, q: f(a / C)),
    "reciprocal_of_stored": (lambda: ex.reciprocal_of_stored(A, C), lambda a, v, x, g, s, q: f(f(1) / a)),
    "decode_by_amax": (lambda: ex.decode_by_amax(Q, S, A, C), lambda a, v, x, g, s, q: f(f(f(q * s) * a) / C)),
    "decode_by_multiplier": (lambda: ex.decode_by_multiplier(Q, S, A, C), lambda a, v, x, g, s, q: f(q * f(s * a))),
    "decode_by_divisor": (lambda: ex.decode_by_divisor(Q, S, A, C), lambda a, v, x, g, s, q: f(q * f(s / a))),
    "decode_by_reciprocal": (
        lambda: ex.decode_by_reciprocal(Q, S, A, C),
        lambda a, v, x, g, s, q: f(q * f(s * f(f(1) / a))),
    ),
    "decode_single_level": (lambda: ex.decode_single_level(Q, S, A, C), lambda a, v, x, g, s, q: f(q * s)),
    "error_by_amax": (
        lambda: ex.error_by_amax(Q, S, X, T),
        lambda a, v, x, g, s, q: f(f(f(f(q * s) * a) / C) - x),
    ),
    "error_by_reciprocal": (
        lambda: ex.error_by_reciprocal(Q, S, X, T),
        lambda a, v, x, g, s, q: f(f(f(q * s) * f(f(1) / g)) - x),
    ),
    "error_scaled": (lambda: ex.error_scaled(Q, S, X, T), lambda a, v, x, g, s, q: f(f(q * s) - f(x * g))),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_formula_on_scalars(name: str) -> None:
    function, scalar = FORMULAS[name]
    expected = np.array([scalar(*row) for row in zip(A, V, X, G, S, Q, strict=True)], np.float32)
    assert_same_bits(function(), expected)


@pytest.mark.parametrize(
    "names",
    [
        ("ratio", "reciprocal_product"),
        ("folded_sixth", "sixth_then_factor"),
        ("folded_sixth", "divided_then_factor"),
        ("sixth_then_factor", "divided_then_factor"),
        ("over_product", "divided_twice"),
        ("over_scale_product", "times_reciprocal_over_scale"),
        ("times_clamped_reciprocal", "over_scale_quotient"),
        ("over_scale", "times_reciprocal_of_scale"),
        ("decode_by_divisor", "decode_by_reciprocal"),
    ],
)
def test_look_alikes_differ(names: tuple[str, str]) -> None:
    """The formulas are equal in exact arithmetic but not in float32. This is why each is a separate function."""
    one, other = (FORMULAS[name][0]() for name in names)
    assert np.allclose(one, other, rtol=1e-6)  # the same quantity …
    assert np.count_nonzero(one != other) > N // 50  # … in other bits


def test_every_expression_is_tested() -> None:
    """Each is tested by its formula above or by its special cases below."""
    corners = {"divided_floored", "store_amax", "store_factor", "as_stored"}
    functions = {
        name for name, value in vars(ex).items() if callable(value) and getattr(value, "__module__", "") == ex.__name__
    }
    assert functions == set(FORMULAS) | corners


# --- corners ---


def scale(amax: float, factor: float, statistics: str = "fp32") -> TensorScale:
    return TensorScale(f32(amax), f32(factor), f(6), C, statistics)


@np.errstate(all="ignore")
def test_factors_of_zero_tiny_and_inf() -> None:
    amax = f32(0, 1e-45, np.inf)
    assert ex.clamped_ratio(amax, C, "fp32").tolist() == [FLOAT32_MAX, FLOAT32_MAX, 1.0]
    assert ex.ratio(amax, C, "fp32").tolist() == [np.inf, np.inf, 0.0]
    assert ex.reciprocal_product(amax, C, "fp32").tolist() == [np.inf, np.inf, 0.0]
    assert ex.reciprocal_product_or_max(amax, C, "fp32").tolist() == [FLOAT32_MAX, np.inf, 0.0]
    assert ex.reciprocal_product_in_statistics(amax, C, "fp32").tolist() == [1.0, 1.0, 0.0]
    assert np.isnan(ex.clamped_ratio(f32(np.nan), C, "fp32")).all()
    assert ex.reciprocal_product_in_statistics(f32(np.nan), C, "fp32").tolist() == [1.0]


@np.errstate(all="ignore")
def test_factor_in_sixteen_bit_statistics() -> None:
    """A = 3: 1/3 in bfloat16 is 0.333984375; times 2688 is 897.75, in bfloat16 896."""
    assert ex.reciprocal_product_in_statistics(f32(3), C, "bf16").tolist() == [896.0]
    # fp16: 2688/A must stay below 65504, so small tensors fall back to 1
    assert ex.reciprocal_product_in_statistics(f32(0.03, 0.05), C, "fp16").tolist() == [1.0, 53760.0]


def test_pre_scale_in_sixteen_bit_statistics() -> None:
    """1/6 in bfloat16 is 0.1669921875."""
    assert ex.factor_times_divided(f32(1), scale(1, 2, "bf16")).tolist() == [2 * 0.1669921875]


def test_pre_scale_corners() -> None:
    assert ex.divided_floored(f32(0, 6), scale(1, 1)).tolist() == [f(1e-12), 1.0]
    assert ex.divided_then_factor_or_zero(f32(6), scale(0, 7)).tolist() == [0.0]
    # a zero block of a static weight counts as amax/6 = 1
    assert_same_bits(ex.static_scale(f32(0), scale(6, 1)), f32(448))


@np.errstate(all="ignore")
def test_element_corners_at_scale_zero() -> None:
    x, zero, t = f32(2, -2, 0), f32(0), scale(1, 1)
    assert ex.times_clamped_reciprocal(x, zero, t).tolist() == [np.inf, -np.inf, 0.0]  # FMAX·2 overflows
    assert ex.times_reciprocal_or_zero(x, zero, t).tolist() == [0.0, 0.0, 0.0]
    assert_same_bits(ex.times_reciprocal_zeroed(x, zero, t), f32(0.0, -0.0, 0.0))
    shrunk = ex.times_reciprocal_shrunk(x, zero, t)
    assert 0 < shrunk[0] < 1e-7
    assert shrunk[1] == -shrunk[0]  # so small negatives keep a sign, and become code 8


def test_stored_numbers_as_they_are() -> None:
    t = scale(3, 5)
    assert (ex.store_amax(t).tolist(), ex.store_factor(t).tolist()) == ([3.0], [5.0])
    assert ex.as_stored(f32(9), C).tolist() == [9.0]
    assert ex.store_reciprocal_or_zero(scale(0, 4)).tolist() == [0.0]


def test_constants() -> None:
    assert_same_bits(np.asarray(ex.SIXTH), np.array(SIXTH))
    assert hex(int(np.asarray(ex.SIXTH).view(np.uint32))) == "0x3e2aaaab"
