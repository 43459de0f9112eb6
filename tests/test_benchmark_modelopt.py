"""Model-Optimizer without a GPU: what stands in for its kernels has their values, and its recipes run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import halfbyte as hb
from benchmarks import quality, quality_layers
from benchmarks.modelopt_cpu import BLOCK, by_columns, static_fake_quant
from benchmarks.quality import weight_error
from benchmarks.quality_layers import Layers, line_of, output_errors
from benchmarks.quality_peers import modelopt_function, peer_recipes
from benchmarks.quality_recipes import Scene, plain
from conformance.peers.spec import quiet
from conformance.peers.tensors import to_torch
from halfbyte.conform import load_vectors
from tests.calibration.scenes import model, windows
from tests.feedback.problems import layer

GOLDEN = Path(__file__).parents[1] / "conformance" / "vectors.zip"


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Importing it warns of what is missing here, and warnings are errors in tests."""
    with quiet():
        import modelopt.torch.export
        import modelopt.torch.quantization  # noqa: F401


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(model(tmp_path_factory.mktemp("modelopt")), windows(8), "cpu")


def test_static_rounding_is_that_of_the_kernel() -> None:
    """The golden cases are Model-Optimizer's own kernel, in Triton's interpreter."""
    vectors = load_vectors(GOLDEN)
    cases = [vectors.case(one) for one in vectors if one["peer"] == "modelopt"]
    cases = [case for case in cases if "fake_quant" in case.tensors]
    assert len(cases) > 20
    for case in cases:
        x, amax = to_torch(case.tensors["input"]).float(), to_torch(case.tensors["block_amax"])
        largest = 256.0 if case.config["mode"] == "four_over_six" else 448.0
        found = static_fake_quant(x, amax, x.abs().max(), True, largest)
        np.testing.assert_array_equal(found.numpy(), case.tensors["fake_quant"], err_msg=case.name)


def test_gptq_by_columns_is_gptq() -> None:
    """Rounding one column gives the bits of rounding the whole weight for every column."""
    from modelopt.torch.quantization.utils.calib_utils import compute_hessian_inverse, gptq_blockwise_update

    given = layer(seed=3, rows=8, width=48)
    weight, h = torch.from_numpy(given.weight), torch.from_numpy(given.second_moment).float()
    amax = weight.reshape(-1, BLOCK).abs().amax(dim=1)
    quantizer = SimpleNamespace(amax=amax, global_amax=amax.max())
    factor = compute_hessian_inverse(h, weight, 0.01)
    whole, columns = weight.clone(), weight.clone()
    gptq_blockwise_update(whole, factor, 32, lambda w: static_fake_quant(w, quantizer.amax, quantizer.global_amax))
    by_columns(gptq_blockwise_update)(columns, factor, 32, quantizer)
    assert torch.equal(whole, columns)
    assert given.output_error(columns) < 0.7 * given.output_error(static_fake_quant(weight, amax, amax.max()))


def recipe(name: str) -> Any:
    return next(one for one in peer_recipes() if one.name == f"Model-Optimizer: {name}")


def test_its_max_is_our_amax(scene: Scene) -> None:
    """The tool's model, calibrated and rounded on the CPU, has the values that halfbyte writes under its contract."""
    found, wanted = recipe("max").make(scene), plain("nvfp4", "amax")(scene)
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def test_its_sweep_is_our_sweep(scene: Scene) -> None:
    """Its search over a model, with the functions that stand in, finds the scales of the search that halfbyte has."""
    found, wanted = recipe("mse, FP8 sweep").make(scene), plain("nvfp4", hb.Sweep())(scene)
    for name, values in wanted.items():
        assert torch.equal(found[name], values), name


def test_its_gptq_runs_layer_by_layer(scene: Scene) -> None:
    """Behind quantized layers it gives other values than its function on statistics of the unquantized model."""
    found, alone = recipe("gptq, layerwise").make(scene), modelopt_function(scene)
    assert found.keys() == scene.weights.keys()
    assert abs(weight_error(scene, found) - weight_error(scene, alone)) < 0.01
    first = [name for name in alone if ".0.self_attn.q" in name]
    last = [name for name in alone if ".1.mlp.down" in name]
    assert len(first) == len(last) == 1
    torch.testing.assert_close(found[first[0]], alone[first[0]])
    assert not torch.allclose(found[last[0]], alone[last[0]])


def test_errors_of_single_layers(scene: Scene) -> None:
    """Model-Optimizer's GPTQ function on the second moments of one layer's inputs lowers the error of every output."""
    one = Layers(scene.source, scene.text, "cpu", [1])
    assert {name.split(".")[2] for name in one.weights} == {"1"}
    amax, gptq = (output_errors(one, make(one)) for make in (plain("nvfp4", "amax"), modelopt_function))
    assert amax.keys() == gptq.keys() == one.weights.keys()
    assert all(0 < gptq[name] < amax[name] for name in amax)


def test_the_error_of_an_output() -> None:
    given = layer(seed=1, rows=4, width=16)
    weight, h = torch.from_numpy(given.weight), torch.from_numpy(given.second_moment)
    values = weight + 0.01 * torch.randn(4, 16, generator=torch.Generator().manual_seed(0))
    one: Any = SimpleNamespace(weights={"a": weight}, inputs=lambda: {"a": ["a"]}, moment=lambda name: h)
    assert output_errors(one, {"a": values})["a"] == pytest.approx(given.output_error(values), rel=1e-5)


def test_a_line_counts_the_layers_that_hb_gptq_wins() -> None:
    figure = {"perplexity": {"value": 20.0}, "kl": {"value": 0.01}}
    made = {"weight_error": 0.1, "seconds": 1.0, "prose": figure, "calibrated": {"a": 0.5, "b": 0.5}}
    ours = {**made, "name": "gptq --stats: blocks in order", "other": {"a": 0.2, "b": 0.4}}
    peer = {**made, "name": "peer", "other": {"a": 0.3, "b": 0.3}}
    assert "0.300000    1/2" in line_of(peer, [ours, peer])
    assert line_of({"name": "peer", "skipped": "no GPU"}, [ours]).endswith("skipped: no GPU")


def test_single_layers_from_the_command(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows in the order of the table, each in the file as soon as it is made."""
    tokens = np.random.default_rng(0).integers(0, 256, 4000).astype(np.uint16)
    for module in (quality, quality_layers):
        monkeypatch.setattr(module, "LENGTH", 40)
        monkeypatch.setattr(module.texts, "tokens", lambda kind, source: tokens)
    monkeypatch.setattr(quality_layers, "SKIP", 1000)
    monkeypatch.setattr(quality_layers, "MODEL", scene.source)
    monkeypatch.setattr(quality_layers, "layer_recipes", list)
    file = tmp_path / "layers.json"
    monkeypatch.setattr("sys.argv", ["layers", "--layers", "1", "--quick", "--json", str(file)])
    quality_layers.main()
    report = json.loads(file.read_text())
    assert tuple(row["name"] for row in report["rows"]) == quality_layers.ROWS
    amax, *_, ours = report["rows"]
    assert all(ours["calibrated"][name] < amax["calibrated"][name] for name in amax["calibrated"])
    assert ours["prose"]["kl"]["value"] > 0
    assert f"{len(amax['other'])} linear layers" in capsys.readouterr().out
