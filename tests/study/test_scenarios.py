"""The scenarios agree with their names, and they are the same in every run."""

from __future__ import annotations

import numpy as np
import pytest

import halfbyte as hb
from halfbyte.study import SCENARIOS, get_scenario
from halfbyte.testing import assert_same_bits

SMALL = [name for name, scenario in SCENARIOS.items() if int(np.prod(scenario.shape)) <= 1 << 20]


def test_there_are_27() -> None:
    assert len(SCENARIOS) == 27
    wanted = {"qkv": (4096, 4096), "mlp-gate-up": (1024, 4096), "embedding": (2048, 1024), "conv": (64, 64, 4, 4)}
    assert {name: SCENARIOS[name].shape for name in wanted} == wanted


@pytest.mark.parametrize("name", SMALL)
def test_a_tensor_is_a_pure_function_of_its_name(name: str) -> None:
    x = get_scenario(name).tensor()
    assert x.dtype == np.float32
    assert np.isfinite(x).all()
    assert x.shape[-1] % 32 == 0
    assert_same_bits(x, get_scenario(name).tensor())


def spread(name: str) -> int | None:
    return hb.cast(hb.quantize(SCENARIOS[name].tensor(), "mxfp4", "modelopt"), "nvfp4", algorithm="hybrid")[1].spread


@pytest.mark.parametrize("wanted", [15, 17, 18, 50])
def test_spreads_are_as_named(wanted: int) -> None:
    assert spread(f"spread-{wanted}") == wanted


def test_what_the_names_promise() -> None:
    x = SCENARIOS["rare-outliers"].tensor()
    assert 0.0005 < (np.abs(x) > 20).mean() < 0.0012
    assert (SCENARIOS["mostly-zeros"].tensor() == 0).mean() > 0.98
    outlier = np.abs(SCENARIOS["single-outlier"].tensor())
    assert (int((outlier > 1).sum()), float(outlier.max())) == (1, 1e4)
    assert np.ptp(SCENARIOS["constant"].tensor()) == 0
    assert np.abs(SCENARIOS["saturating"].tensor()).max() == 6
    assert SCENARIOS["conv"].tensor().shape == (64, 1024), "the last axes are joined"
    wide = spread("mixed-scales")
    assert wide is not None
    assert 24 <= wide <= 28


def test_an_unknown_scenario_lists_the_known() -> None:
    with pytest.raises(hb.UnknownNameError, match="unknown scenario 'nothing'; known: bimodal-magnitudes"):
        get_scenario("nothing")
