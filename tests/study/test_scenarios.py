"""The scenarios agree with their names, and they are the same in every run."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

import halfbyte as hb
from halfbyte.study import SCENARIOS, get_scenario
from halfbyte.testing import assert_same_bits

SMALL = [name for name, scenario in SCENARIOS.items() if int(np.prod(scenario.shape)) <= 1 << 20]


def values(name: str) -> npt.NDArray[np.float64]:
    return SCENARIOS[name].tensor().astype(np.float64)


def test_there_are_the_27_of_the_public_study_and_four_more() -> None:
    assert sum(scenario.public for scenario in SCENARIOS.values()) == 27
    assert [name for name, scenario in SCENARIOS.items() if not scenario.public] == [
        "blocks-17", "blocks-18", "blocks-50", "blocks-mixed",
    ]  # fmt: skip
    others = {
        "qkv": (4096, 4096), "mlp-gate-up": (1024, 4096), "embedding": (2048, 1024), "layernorm-gain": (32, 1024),
        "conv": (64, 64, 4, 4), "large-flat": (1024, 4096),
    }  # fmt: skip
    assert {name: scenario.shape for name, scenario in SCENARIOS.items() if scenario.shape != (256, 1024)} == others


@pytest.mark.parametrize("name", SMALL)
def test_a_tensor_is_a_pure_function_of_its_name(name: str) -> None:
    x = get_scenario(name).tensor()
    assert x.dtype == ml_dtypes.bfloat16
    assert np.isfinite(x.astype(np.float32)).all()
    assert x.shape[-1] % 32 == 0
    assert_same_bits(x, get_scenario(name).tensor())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("uniform", 3**-0.5), ("gaussian", 1), ("heavy-tail", 1), ("narrow-range", 1.25**0.5), ("llm-weight", None),
        ("subnormal-heavy", 1e-8), ("saturating", 1), ("bimodal-signs", 9.01**0.5), ("constant", 1.5),
        ("bimodal-magnitudes", 32**0.5), ("layernorm-gain", 1.0025**0.5), ("conv", 0.1), ("mostly-zeros", 0.05),
    ],
)  # fmt: skip
def test_root_mean_squares_are_those_of_the_definitions(name: str, expected: float | None) -> None:
    x = values(name)
    if expected is None:  # outliers decide the mean: look at the median of |N|/32
        assert np.median(np.abs(x)) == pytest.approx(0.6745 / 32, rel=0.01)
        return
    assert np.sqrt((x**2).mean()) == pytest.approx(expected, rel=0.03)


def spread(name: str) -> int | None:
    return hb.cast(hb.quantize(SCENARIOS[name].tensor(), "mxfp4", "modelopt"), "nvfp4", algorithm="hybrid")[1].spread


@pytest.mark.parametrize(
    ("name", "wanted"), [("spread-15", 17), ("blocks-17", 17), ("blocks-18", 18), ("blocks-50", 50)]
)
def test_spreads(name: str, wanted: int) -> None:
    """0.5 N adds two octaves to the groups of rows; the published spreads are tested with the published figures."""
    assert spread(name) == wanted


@pytest.mark.parametrize(
    ("name", "lowest", "octaves"),
    [
        ("mixed-scales", -12, 25),
        ("spread-15", -7, 15),
        ("spread-17", -8, 17),
        ("spread-18", -9, 18),
        ("spread-50", -25, 50),
    ],
)
def test_groups_of_rows_have_their_powers_of_two(name: str, lowest: int, octaves: int) -> None:
    std = 0.3 if name == "mixed-scales" else 0.5
    sizes = np.sqrt((values(name).reshape(16, 16, 1024) ** 2).mean(axis=(1, 2)))
    wanted = [std * 2.0 ** (lowest + octaves * i // 15) for i in range(16)]
    assert sizes == pytest.approx(wanted, rel=0.05)


def test_outliers_are_where_the_definitions_say() -> None:
    x = values("rare-outliers")
    assert 0.0007 < (np.abs(x) == 100).mean() < 0.0013
    assert np.abs(x[np.abs(x) < 100]).max() < 0.5
    assert (values("mostly-zeros") == 0).mean() == pytest.approx(0.99, abs=0.001)
    single = values("single-outlier")
    assert single[128, 512] == np.float32(1e4).astype(ml_dtypes.bfloat16)
    assert (np.abs(single) > 1).sum() == 1
    rows, columns = np.nonzero(np.abs(values("row-outliers")) == 30)
    assert (len(set(rows)), len(set(columns)), len(rows)) == (4, 16, 64)
    by_column = np.abs(values("column-outliers")).mean(axis=0)
    assert (by_column > 1).sum() == 8
    assert np.abs(values("pareto")).max() <= 0.05 * (1e6 ** (2 / 3) - 1)
    assert np.median(np.abs(values("pareto"))) == pytest.approx(0.05 * (2 ** (2 / 3) - 1), rel=0.02)
    assert set(np.unique(values("constant"))) == {1.5}
    assert SCENARIOS["conv"].tensor().shape == (64, 1024), "the last axes are joined"
    by_row = np.sqrt((values("mlp-gate-up") ** 2).mean(axis=1))
    assert (by_row > 3 / 64).sum() == 32
    by_row = np.sqrt((values("embedding") ** 2).mean(axis=1))
    assert (by_row > 5).sum() == 8


def test_an_unknown_scenario_lists_the_known() -> None:
    with pytest.raises(hb.UnknownNameError, match="unknown scenario 'nothing'; known: bimodal-magnitudes"):
        get_scenario("nothing")
