"""Methods are data: names, options, equality."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.methods import METHODS, Method, check_method_name


def test_table_is_keyed_by_name() -> None:
    assert METHODS.keys() >= {"amax", "four_six", "sweep"}
    assert all(kind.name == name and issubclass(kind, Method) for name, kind in METHODS.items())


def test_defaults_of_four_six() -> None:
    method = hb.FourSix()
    assert (method.error, method.e4m3_max, method.fast_error) == ("mae", 448, False)
    assert method == hb.FourSix("mae", 448, False)
    assert method != hb.FourSix("mse")


@pytest.mark.parametrize("method", [hb.Amax(), hb.FourSix("mse", 256, True), hb.Sweep(), hb.Sweep(fused=True)])
def test_methods_are_values(method: Method) -> None:
    assert hash(method) == hash(type(method)(**vars(method)))
    assert method == type(method)(**vars(method))
    assert eval(repr(method), vars(hb)) == method
    with pytest.raises(AttributeError):
        method.error = "mse"  # type: ignore[attr-defined]


def test_methods_with_arrays_are_equal_to_themselves_alone() -> None:
    weights, h = np.ones(32), np.eye(16)[None]
    assert hb.Optimal() == hb.Optimal()
    assert hash(hb.Optimal()) == hash(hb.Optimal())
    weighted, through = hb.Optimal(weights), hb.Hessian(h)
    assert weighted == weighted
    assert through == through
    assert weighted not in (hb.Optimal(weights), hb.Optimal())
    assert through != hb.Hessian(h)


def test_methods_copy_their_arrays() -> None:
    weights, h = np.ones(32, np.float32), np.eye(16, dtype=np.float32)[None]
    weighted, through = hb.Optimal(weights), hb.Hessian(h)
    weights[:], h[:] = 2, 3
    kept = weighted.channel_weights
    assert kept is not None
    assert (kept == 1).all()
    assert (through.matrices == np.eye(16)).all()


@pytest.mark.parametrize("error", ["mean", "MAE", "", None])
def test_unknown_error(error: Any) -> None:
    with pytest.raises(hb.UnknownNameError, match=r"unknown 4over6 error .*; known: abs_max, mae, mse$"):
        hb.FourSix(error)


@pytest.mark.parametrize("e4m3_max", [0, 240, 447, None])
def test_unknown_e4m3_max(e4m3_max: Any) -> None:
    with pytest.raises(hb.UnknownNameError, match=f"e4m3_max is 448 or 256, not {e4m3_max}"):
        hb.FourSix(e4m3_max=e4m3_max)


def test_method_names() -> None:
    assert check_method_name("four_six") is hb.FourSix
    with pytest.raises(hb.UnknownNameError, match="unknown method 'best'; known: amax, four_six"):
        check_method_name("best")
