"""Single layers of SmolLM2-135M by every GPTQ: the error of their outputs, and the model with only them in NVFP4.

    python -m benchmarks.quality_layers [--layers 2 15 27] [--windows 32] [--measured 16] [--quick] [--json FILE]

Every row solves the same weights with the same second moments of inputs, those of windows of prose. "calibrated" and
"other" are the mean squared error of the layers' outputs, relative, on that prose and on the windows that are measured
on: means over the linear layers. "ahead": for how many of them hb.gptq has the lower error on the other prose.
Perplexity and KL are those of the model with these layers in NVFP4 and the others in float32.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import texts
from benchmarks.machine import describe_machine, describe_versions, distribution_version, load_average
from benchmarks.quality import LENGTH, MODEL, PEERS, SKIP, Judge, weight_error
from benchmarks.quality_peers import layer_recipes
from benchmarks.quality_recipes import Recipe, Scene, SkippedError, Values, recipes
from halfbyte.calibration.tokens import Windows

OURS = "gptq --stats: blocks in order"
ROWS = ("amax", "optimal", "hessian, by statistics", "gptq, Hessian scales, left to right", OURS)
COLUMNS = " ".join([f"{'method':40s}", " weights calibrated    other  ahead    prose        KL  seconds"])


class Layers(Scene):
    """Some layers of the model, all their linear weights."""

    def __init__(self, source: Path, text: Windows, device: str, numbers: list[int]) -> None:
        super().__init__(source, text, device)
        parts = tuple(f".layers.{number}." for number in numbers)
        self.weights = {name: one for name, one in self.weights.items() if any(part in name for part in parts)}


def output_errors(scene: Scene, values: Values) -> dict[str, float]:
    """By linear layer: mean squared error of its output on the scene's text, relative to the output's mean square."""
    found = {}
    for first, names in scene.inputs().items():
        h = scene.moment(first).double()
        for name in names:
            weight = scene.weights[name].double()
            wrong = values[name].double() - weight
            found[name] = float(((wrong @ h) * wrong).sum() / ((weight @ h) * weight).sum())
    return found


def measure(recipe: Recipe, scene: Layers, other: Layers, judge: Judge) -> dict[str, Any]:
    """All figures of one row, or why there is none."""
    began = time.perf_counter()
    found: dict[str, Any] = {"name": recipe.name, "format": recipe.format}
    try:
        values = recipe.make(scene)
    except SkippedError as reason:
        return found | {"skipped": str(reason)}
    found |= {"seconds": time.perf_counter() - began, "weight_error": weight_error(scene, values)}
    found |= {"calibrated": output_errors(scene, values), "other": output_errors(other, values)}
    return found | {"prose": judge.figures("prose", values)}


def line_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row as it is printed."""
    if "skipped" in row:
        return f"{row['name']:40s} skipped: {row['skipped']}"
    ours = next((one for one in rows if one["name"] == OURS), None)
    ahead = ""
    if ours is not None and ours is not row:
        ahead = f"{sum(ours['other'][name] < error for name, error in row['other'].items())}/{len(row['other'])}"
    calibrated, other = (float(np.mean(list(row[part].values()))) for part in ("calibrated", "other"))
    prose = row["prose"]
    return (
        f"{row['name']:40s} {100 * row['weight_error']:7.2f}% {calibrated:10.6f} {other:8.6f} {ahead:>6s} "
        f"{prose['perplexity']['value']:8.4f} {prose['kl']['value']:9.6f} {row['seconds']:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 15, 27])
    parser.add_argument("--windows", type=int, default=32, help="of calibration")
    parser.add_argument("--measured", type=int, default=16, help="windows to measure on")
    parser.add_argument("--quick", action="store_true", help="4 windows of calibration, 2 to measure on")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    windows, measured = (4, 2) if given.quick else (given.windows, given.measured)
    prose = texts.tokens("prose", MODEL).astype(np.int64)
    cut, rest = (prose[at : at + count * LENGTH].reshape(-1, LENGTH) for at, count in ((SKIP, windows), (0, measured)))
    scene = Layers(MODEL, Windows(cut, "prose"), given.device, given.layers)
    other = Layers(MODEL, Windows(rest, "other prose"), given.device, given.layers)
    judge = Judge(MODEL, measured, given.device, ("prose",))
    source = judge.figures("prose", {})["perplexity"]["value"]
    report: dict[str, Any] = {
        "command": " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "versions": describe_versions(False) | {name: distribution_version(name) for name in ("torch", *PEERS)},
        "load": load_average(),
        "settings": {"calibration": windows, "measured": measured, "length": LENGTH, "layers": given.layers},
        "source": source,
        "rows": [],
    }
    print("; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    print(f"{report['settings']}, {len(scene.weights)} linear layers; unquantized: {source:.4f}")
    print(COLUMNS, flush=True)
    ours = {one.name: one for one in recipes() if one.format == "nvfp4"}
    for recipe in [*(ours[name] for name in ROWS), *layer_recipes()]:
        report["rows"].append(measure(recipe, scene, other, judge))
        print(line_of(report["rows"][-1], report["rows"]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
