"""Rows of other tools in the quality benchmarks, and the sentence encoder's."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import qwantize
import torch

from benchmarks.quality_embeddings import encoder_recipes, figures, line_of
from benchmarks.quality_peers import (
    _roots,
    _stand_ins,
    layer_recipes,
    ordered_feedback,
    peer_recipes,
)
from benchmarks.quality_recipes import Scene, SkippedError
from tests.calibration.scenes import model, windows
from tests.feedback.problems import layer


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(model(tmp_path_factory.mktemp("peers")), windows(8), "cpu")


def test_the_loop_around_qwantize_is_the_published_one() -> None:
    """The error is that of experiments/quant_gptq_strided.py at commit f4d1ffa, whose values these are as well."""
    given = layer(seed=3, rows=8, width=48)
    weight, h = torch.from_numpy(given.weight), torch.from_numpy(given.second_moment)
    found = ordered_feedback(weight, h, qwantize.nvfp4_optimal_hessian)
    assert given.output_error(found) == pytest.approx(0.00187657681, rel=1e-6)


def test_feedback_without_correlation_is_the_search_alone() -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    found = ordered_feedback(weight, torch.eye(32), qwantize.nvfp4_optimal_hessian)
    alone = qwantize.nvfp4_optimal(weight.reshape(6, 2, 16), return_dequant=True)[2].reshape(6, 32)
    assert torch.equal(found, alone)


def test_roots_stand_for_inputs() -> None:
    x = torch.randn(50, 3, 16, generator=torch.Generator().manual_seed(0))
    parts = torch.einsum("tjk,tjl->jkl", x, x)
    roots = _roots(parts)
    torch.testing.assert_close(roots.mT @ roots, parts, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("recipe", peer_recipes() + layer_recipes(), ids=lambda recipe: recipe.name)
def test_what_cannot_run_here_says_why(scene: Scene, recipe, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    for name in ("llmcompressor", "qwantize", "modelopt"):
        for part in (name, *(one for one in sys.modules if one.startswith(f"{name}."))):
            monkeypatch.setitem(sys.modules, part, None)
    with pytest.raises(SkippedError, match="is not installed"):
        recipe.make(scene)


def test_stand_ins_are_gone_afterwards() -> None:
    with _stand_ins("no_such_package", "json"):
        assert "no_such_package.formatting.formatting" in sys.modules
        import json

        assert json.loads("1") == 1
    assert not [name for name in sys.modules if name.startswith("no_such_package")]


def test_figures_of_embeddings(tmp_path: Path) -> None:
    wanted = np.eye(4)
    same = figures(wanted, wanted)
    assert same["error"]["value"] == 0
    assert same["cosine"]["value"] == 1
    turned = figures(np.roll(wanted, 1, axis=0), wanted)
    assert turned["cosine"]["value"] == 0
    assert turned["error"]["value"] == pytest.approx(2 / 0.75)  # squared distance 2, variance 3/4


def test_rows_of_the_encoder() -> None:
    """No row that needs a decoder, and a share of the loss against amax of the same format."""
    names = {f"{one.format} {one.name}" for one in encoder_recipes()}
    assert {"nvfp4 gptq --stats: blocks in order", "mxfp4 gptq --stats", "nvfp4 four_six"} <= names
    assert not [name for name in names if "calibrate" in name or "sequential" in name or "smooth" in name]

    def row(name: str, error: float) -> dict[str, object]:
        number = {"value": error, "low": error, "high": error}
        parts = {part: {"error": number, "cosine": number} for part in ("prose", "code", "prose_w4a4", "code_w4a4")}
        return {"name": name, "format": "nvfp4", "weight_error": 0.1, "seconds": 1.0, **parts}

    rows = [row("amax", 0.08), row("gptq", 0.02)]
    assert "| 75 % |" in line_of(rows[1], rows)
