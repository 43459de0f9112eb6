"""Every row of the quality benchmark on a tiny model: weights of the right shapes, close to the source's."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.quality import rounding_for, weight_error
from benchmarks.quality_recipes import Scene, recipes
from benchmarks.quality_tables import line_of, recovered, recovered_interval, table
from tests.calibration.scenes import model, windows


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    return Scene(model(tmp_path_factory.mktemp("quality")), windows(8), "cpu")


@pytest.mark.parametrize("recipe", recipes(), ids=lambda recipe: f"{recipe.format} {recipe.name}")
def test_a_row(scene: Scene, recipe) -> None:  # type: ignore[no-untyped-def]
    values = recipe.make(scene)
    assert values.keys() == scene.weights.keys()
    assert 0.02 < weight_error(scene, values) < 0.4


def test_activations_have_the_scales_of_calibration(scene: Scene) -> None:
    rounding = rounding_for(scene, "nvfp4")
    name = next(iter(scene.weights))
    assert rounding.scales[name] == scene.statistics().get(name).input_amax / (448 * 6)


def test_shares_of_the_loss(tmp_path: Path) -> None:
    def row(name: str, perplexity: float) -> dict[str, object]:
        number = {"value": 0.5}
        figures = {"perplexity": {"value": perplexity}, "source_perplexity": {"value": 20.0}, "kl": number}
        return {
            "name": name, "format": "nvfp4", "weight_error": 0.1, "seconds": 1.0, "prose": figures | {"top1": number},
        }  # fmt: skip

    rows = [row("amax", 28.0), row("better", 22.0)]
    assert recovered(rows[0], rows, "prose") == 0
    assert recovered(rows[1], rows, "prose") == pytest.approx(0.75)
    assert "75.0 %" in line_of(rows[1], rows)
