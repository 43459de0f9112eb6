"""Every row of the quality benchmark on a tiny model: weights of the right shapes, close to the source's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.quality import rounding_for, row_of, started, weight_error
from benchmarks.quality_recipes import Recipe, Scene, SkippedError, recipes
from benchmarks.quality_tables import comparison, line_of, recovered, recovered_interval, table
from halfbyte.calibration.evaluation import result_of
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


def row(name: str, losses: list[float], source: list[float]) -> dict[str, Any]:
    """A row with figures on prose alone, from the loss of every window."""
    table = np.array([losses, source, [0.5] * len(losses), [0.5] * len(losses)]).T
    figures = result_of(table, 40, "").as_json() | {"windows": {"loss": losses, "source": source}}
    return {"name": name, "format": "nvfp4", "weight_error": 0.1, "seconds": 1.0, "prose": figures}


def test_shares_of_the_loss() -> None:
    source = [math.log(20.0)] * 4
    rows = [row("amax", [math.log(28.0)] * 4, source), row("better", [math.log(22.0)] * 4, source)]
    assert recovered(rows[0], rows, "prose") == 0
    assert recovered(rows[1], rows, "prose") == pytest.approx(0.75)
    assert "75.0 %" in line_of(rows[1], rows)


def test_the_interval_of_a_share_takes_the_same_windows_for_both_rows() -> None:
    """Windows differ much and every one gives back half of its loss: the share is certain all the same."""
    source = [1.0, 2.0, 3.0, 4.0]
    rows = [row("amax", [one + 0.2 for one in source], source), row("half", [one + 0.1 for one in source], source)]
    low, high = recovered_interval(rows[1], rows, "prose") or (0.0, 0.0)
    assert low == pytest.approx(high) == pytest.approx(recovered(rows[1], rows, "prose"))
    uneven = row("uneven", [1.0, 2.2, 3.0, 4.2], source)
    low, high = recovered_interval(uneven, [rows[0], uneven], "prose") or (0.0, 0.0)
    assert low < (recovered(uneven, [rows[0], uneven], "prose") or 0.0) - 0.1 < high - 0.2
    assert "(" in table({"rows": [rows[0], uneven]}, "nvfp4")[-1]


def test_rows_that_were_not_computed_say_why(scene: Scene) -> None:
    def make(scene: Scene) -> Any:
        raise SkippedError("no GPU")

    found = row_of(Recipe("peer", "nvfp4", make), scene, None)  # type: ignore[arg-type]
    assert found == {"name": "peer", "format": "nvfp4", "skipped": "no GPU"}
    assert "skipped: no GPU" in line_of(found, [found])
    assert table({"rows": [found]}, "nvfp4")[-1] == "| peer | no GPU |"


def test_a_run_keeps_its_rows(tmp_path: Path) -> None:
    file, settings = tmp_path / "rows.json", {"calibration": 4}
    assert started(file, settings) == []
    kept = row("amax", [1.0], [1.0])
    rows = [kept, {"name": "peer", "format": "nvfp4", "skipped": "no GPU"}]
    file.write_text(json.dumps({"settings": settings, "rows": rows}))
    assert started(file, settings) == [kept]
    with pytest.raises(SystemExit, match="name another file"):
        started(file, {"calibration": 8})


def test_smoothed_scenes_have_divided_statistics(scene: Scene) -> None:
    """The second moments of the smoothed model's inputs, and the output of its layers, are those of the model."""
    smooth = scene.smoothed(False)
    assert smooth is scene.smoothed(False)
    assert smooth.smoothing is not None
    name = next(name for name in smooth.weights if name in smooth.smoothing.columns)
    before, after = (one.weights[name].double() @ one.moment(name).double() for one in (scene, smooth))
    power = torch.from_numpy(np.ldexp(1.0, smooth.smoothing.columns[name].astype(np.int32)))
    assert (power != 1).any()
    torch.testing.assert_close(after * power, before)


def test_rows_compared_with_one_row() -> None:
    """Every window of the second row costs a tenth more than that of the first, however hard the window is."""
    source = [1.0, 2.0, 3.0]
    rows = [
        row("ours", [1.1, 2.2, 3.3], source),
        row("peer", [1.1 + math.log(1.1), 2.2 + math.log(1.1), 3.3 + math.log(1.1)], source),
    ]
    for one, kl in zip(rows, ([0.1, 0.2, 0.3], [0.15, 0.25, 0.35]), strict=True):
        one["prose"]["windows"]["kl"] = kl
    report = {"rows": [*rows, {"name": "missing", "skipped": "no GPU"}]}
    assert comparison(report, "ours")[2:] == ["| peer | +10.00 % (+10.00 to +10.00) | +0.0500 (+0.0500 to +0.0500) |"]
    with pytest.raises(SystemExit, match="no row is called 'their'; there are 'ours', 'peer'"):
        comparison(report, "their")
