"""The method study: known figures on normal numbers, the ideal scale by brute force, weights from files."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import halfbyte as hb
from halfbyte.study import MethodRow, run_methods
from halfbyte.study.ideal import ideal_squared_errors, shannon_bound
from halfbyte.study.methods import HESSIAN, METHODS, measure_tensor
from halfbyte.study.weights import read_weights
from tests.samples import E2M1_VALUES, gaussian


def test_normal_numbers_give_the_known_figures() -> None:
    row = measure_tensor("x", gaussian(1024, 1024))
    found = {name: round(100 * error, 2) for name, error in row.errors.items()}
    expected = {"amax": 9.50, "4over6 MSE 256": 8.69, "optimal": 8.12, "ideal scale": 7.80, "Shannon bound": 4.42}
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=0.03)
    assert row.rows == 1024


@pytest.mark.parametrize("seed", range(4))
def test_ideal_scale_against_a_fine_grid(seed: int) -> None:
    blocks = gaussian(6, 16, seed=seed).astype(np.float64)
    blocks[0, 3:] = 0
    blocks[1] = blocks[1].round()
    grid = np.array(E2M1_VALUES)
    for block, found in zip(np.abs(blocks), ideal_squared_errors(blocks), strict=True):
        scales = block.max() * np.geomspace(1 / 14, 2, 4000)
        tried = (np.abs(block[None, :, None] - scales[:, None, None] * grid).min(axis=2) ** 2).sum(axis=1).min()
        energy = float((block**2).sum())
        assert tried - 1e-6 * energy <= found <= tried + 1e-12 * energy, "the grid misses the best scale by little"


def test_no_method_beats_the_ideal_scale() -> None:
    for row in run_methods([("a", gaussian(64, 256)), ("b", gaussian(64, 256, seed=1) ** 3)]):
        assert all(row.errors[name] >= row.errors["ideal scale"] for name in METHODS)
        assert row.errors["optimal"] <= row.errors["amax"]


def test_shannon_bound_is_two_to_the_minus_bits() -> None:
    assert shannon_bound(4.5) == pytest.approx(0.0441942)


def test_errors_are_those_of_quantize() -> None:
    x = gaussian(32, 128)
    row = measure_tensor("x", x)
    y = hb.dequantize(hb.quantize(x, "nvfp4", "transformer_engine", hb.FourSix("mae", 256)))
    assert row.errors["4over6 MAE 256"] == pytest.approx(float(np.linalg.norm(y - x) / np.linalg.norm(x)), rel=1e-5)


def test_a_sample_keeps_the_global_amax_of_the_whole() -> None:
    x = gaussian(64, 64)
    x[1, 0] = 1e4
    part = measure_tensor("x", x, sample=64 * 32)
    assert part.rows == 32
    y = np.asarray(hb.dequantize(hb.quantize(x[::2].copy(), "nvfp4", global_amax=1e4)))
    assert part.errors["amax"] == pytest.approx(float(np.linalg.norm(y - x[::2]) / np.linalg.norm(x[::2])), rel=1e-5)
    assert measure_tensor("row", gaussian(1, 4096), sample=1000).rows == 1


@pytest.mark.parametrize("sample", [1 << 20, 128 * 64])
def test_optimal_has_its_headroom(sample: int) -> None:
    """On uniform weights, as a fresh layer has them, 4over6 with 256 would beat optimal without headroom."""
    x = np.random.default_rng(0).uniform(-1, 1, (128, 256)).astype(np.float32)
    row = measure_tensor("x", x, sample=sample)
    assert row.errors["optimal"] == min(row.errors[name] for name in METHODS)
    q = hb.quantize(x, "nvfp4", "transformer_engine", "optimal")
    step = 128 // row.rows
    lost, whole = (hb.dequantize(q) - x)[::step], x[::step]
    assert row.errors["optimal"] == pytest.approx(float(np.linalg.norm(lost) / np.linalg.norm(whole)), rel=1e-5)


def test_hessian_has_the_headroom_of_optimal() -> None:
    """On uniform weights, with inputs that all count alike, it would otherwise be far behind."""
    x = np.random.default_rng(0).uniform(-1, 1, (128, 256)).astype(np.float32)
    row = measure_tensor("x", x, np.repeat(np.eye(16, dtype=np.float32)[None], 16, 0), sample=64 * 256)
    assert row.errors[HESSIAN] == pytest.approx(row.errors["optimal"], rel=1e-3)


def test_hessian_joins_where_statistics_are_given() -> None:
    rng = np.random.default_rng(0)
    activations = (rng.standard_normal((128, 64)) * np.exp(rng.standard_normal(64))).astype(np.float32)
    h = hb.hessian_from_activations(activations)
    x = gaussian(32, 64)
    by_activations = measure_tensor("x", x, activations)
    assert by_activations == measure_tensor("x", x, h)
    assert HESSIAN in by_activations.errors
    assert by_activations.output_errors[HESSIAN] < by_activations.output_errors["optimal"]
    residual = np.asarray(hb.dequantize(hb.quantize(x, "nvfp4")), np.float64) - x
    through = np.linalg.norm(np.einsum("rki,tki->rtk", residual.reshape(32, 4, 16), activations.reshape(128, 4, 16)))
    wanted = np.linalg.norm(np.einsum("rki,tki->rtk", x.reshape(32, 4, 16), activations.reshape(128, 4, 16)))
    assert by_activations.output_errors["amax"] == pytest.approx(float(through / wanted), rel=1e-4)
    with pytest.raises(hb.InputError, match=r"statistics of x have shape \(128, 32\); a width of 64 needs"):
        measure_tensor("x", x, activations[:, :32])


@pytest.mark.parametrize("bad", [np.zeros((2, 16), np.float32), np.full((2, 16), np.nan, np.float32)])
def test_tensors_without_an_error_are_refused_by_name(bad: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    with pytest.raises(hb.InputError, match=r"layer\.w of shape \(2, 16\) holds NaN or Inf, or only zeros"):
        measure_tensor("layer.w", bad)
    with pytest.raises(hb.InputError, match="the last axis is not a multiple of 16"):
        measure_tensor("layer.w", gaussian(2, 20))


def test_weights_are_read_from_files_and_directories(tmp_path: Path) -> None:
    first, second = gaussian(4, 32).astype(ml_dtypes.bfloat16), gaussian(2, 8, 16, seed=1)
    save_file({"a.weight": first, "a.bias": gaussian(32), "odd": gaussian(3, 20)}, tmp_path / "1.safetensors")
    save_file({"b.weight": second, "ids": np.arange(32).reshape(2, 16)}, tmp_path / "2.safetensors")
    found = dict(read_weights(tmp_path))
    assert set(found) == {"a.weight", "b.weight"}
    assert np.array_equal(found["a.weight"].view(np.uint16), first.view(np.uint16))
    assert set(dict(read_weights(tmp_path / "2.safetensors"))) == {"b.weight"}
    rows = run_methods(read_weights(tmp_path))
    assert [(row.name, row.shape) for row in rows] == [("a.weight", (4, 32)), ("b.weight", (2, 8, 16))]
    assert all(isinstance(row, MethodRow) for row in rows)
    with pytest.raises(hb.InputError, match="neither a safetensors file nor a directory"):
        dict(read_weights(tmp_path / "nowhere"))
