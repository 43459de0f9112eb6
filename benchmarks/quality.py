"""What quantization costs a language model: SmolLM2-135M by every method, on prose and on code.

    python -m benchmarks.quality [--device cuda] [--quick] [--rows REGEX] [--json FILE]

Statistics are taken from windows of 1,024 tokens of prose from token 200,000 on. Perplexity, KL to the source model
and the share of equal likeliest tokens are measured on the first 64 windows of the prose and of Python source. "of the
loss" is how much of amax's loss in perplexity on prose a row gives back. W4A4 rounds activations to the format of
the weights as well; NVFP4 with input scales by the amax of calibration. All is computed in float32.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import texts
from benchmarks.machine import describe_machine, describe_versions, distribution_version, load_average
from benchmarks.quality_recipes import Recipe, Scene, Values, recipes
from halfbyte.calibration.evaluation import Rounding, compare, final_states
from halfbyte.calibration.layered import LayeredModel
from halfbyte.calibration.states import States
from halfbyte.calibration.tokens import Windows
from halfbyte.calibration.weights import open_weights
from halfbyte.formats import get_format
from halfbyte.smoothing import Smoothing

MODEL = texts.ROOT / ".demo" / "smollm2-135m"
LENGTH = 1024
SKIP = 200_000
"""Tokens of prose before those of calibration: they are measured on."""
HEADS = {"error": 7, "prose": 8, "of loss": 8, "KL": 7, "top-1": 6, "code": 8, "KL ": 7, "W4A4": 8, "of loss ": 8}
COLUMNS = " ".join([f"{'method':48s}", *(f"{head.strip():>{width}s}" for head, width in HEADS.items()), " seconds"])


class Judge:
    """The unquantized model and its last states, to compare others with."""

    def __init__(self, source: Path, windows: int, device: str) -> None:
        self.source, self.device = source, device
        self.model = LayeredModel(open_weights(source), device)
        self.tokens: dict[str, torch.Tensor] = {}
        self.states: dict[str, States] = {}
        for kind in texts.KINDS:
            cut = texts.tokens(kind, source)[: windows * LENGTH].astype(np.int64)
            self.tokens[kind] = torch.from_numpy(cut[: len(cut) // LENGTH * LENGTH].reshape(-1, LENGTH))
            self.states[kind] = final_states(self.model, self.tokens[kind])

    def figures(
        self, kind: str, values: Values, rounding: Rounding | None = None, smoothing: Smoothing | None = None
    ) -> dict[str, Any]:
        """Of the model with other weights on a text. smoothing: factors in norms that belong to these weights."""
        tokens = self.tokens[kind]
        model = self.model if smoothing is None else LayeredModel(open_weights(self.source, smoothing), self.device)
        after = final_states(model, tokens, values, rounding)
        return compare(self.model, self.states[kind], model, after, tokens, "").as_json()


def rounding_for(scene: Scene, format: str) -> Rounding:
    """Activations as a server rounds them, with input scales by the amax of calibration."""
    scales = {}
    if format == "nvfp4":
        scales = {name: scene.input_amax(name) / (448 * 6) for name in scene.weights}
    return Rounding(get_format(format), scene.weights.__contains__, scales)


def weight_error(scene: Scene, values: Values) -> float:
    """Mean squared error of all weights, relative to their mean square, as a root."""
    wrong = sum(float((values[name] - weight).double().square().sum()) for name, weight in scene.weights.items())
    return math.sqrt(wrong / sum(float(weight.double().square().sum()) for weight in scene.weights.values()))


def measure(recipe: Recipe, scene: Scene, judge: Judge) -> dict[str, Any]:
    """All figures of one row."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    used = time.process_time()
    if recipe.smooth:
        scene = scene.smoothed()
    values = recipe.make(scene)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found: dict[str, Any] = {"name": recipe.name, "format": recipe.format, "seconds": time.perf_counter() - began}
    found["cpu_seconds"] = time.process_time() - used
    found["weight_error"] = weight_error(scene, values)
    found["prose"] = judge.figures("prose", values, None, scene.smoothing)
    if recipe.code:
        found["code"] = judge.figures("code", values, None, scene.smoothing)
    if recipe.activations:
        found["prose_w4a4"] = judge.figures("prose", values, rounding_for(scene, recipe.format), scene.smoothing)
    return found


def recovered(row: dict[str, Any], rows: list[dict[str, Any]], part: str) -> float | None:
    """How much of the loss of amax in the same format the row gives back."""
    base = next((one for one in rows if one["name"] == "amax" and one["format"] == row["format"]), None)
    if base is None or part not in base or part not in row:
        return None
    source, lost = row[part]["source_perplexity"]["value"], base[part]["perplexity"]["value"]
    return float((lost - row[part]["perplexity"]["value"]) / (lost - source))


def line_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    def number(part: str, what: str, digits: int) -> str:
        return f"{row[part][what]['value']:.{digits}f}" if part in row else ""

    def share(part: str) -> str:
        found = recovered(row, rows, part)
        return "" if found is None else f"{100 * found:.1f} %"

    return (
        f"{row['format'] + ' ' + row['name']:48s} {row['weight_error']:7.4f} {number('prose', 'perplexity', 3):>8s} "
        f"{share('prose'):>8s} {number('prose', 'kl', 4):>7s} {number('prose', 'top1', 3):>6s} "
        f"{number('code', 'perplexity', 3):>8s} {number('code', 'kl', 4):>7s} "
        f"{number('prose_w4a4', 'perplexity', 3):>8s} {share('prose_w4a4'):>8s} {row['seconds']:8.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--quick", action="store_true", help="4 windows of calibration, 4 to measure on")
    parser.add_argument("--windows", type=int, default=128, help="of calibration")
    parser.add_argument("--measured", type=int, default=64, help="windows to measure on")
    parser.add_argument("--rows", default="", help="only rows whose format and name match this expression")
    parser.add_argument("--limit", type=float, default=1e9, help="start no row after this many seconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not (MODEL / "model.safetensors").exists():
        from tests.real import smollm2

        smollm2.fetch()
    windows, measured = (4, 4) if given.quick else (given.windows, given.measured)
    began = time.perf_counter()
    prose = texts.tokens("prose", MODEL)
    cut = prose[SKIP : SKIP + windows * LENGTH].astype(np.int64).reshape(-1, LENGTH)
    report: dict[str, Any] = {
        "machine": describe_machine(),
        "versions": describe_versions(False)
        | {name: distribution_version(name) for name in ("torch", "transformers", "triton")},
        "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu",
        "load": load_average(),
        "windows": {"calibration": windows, "measured": measured, "length": LENGTH},
        "rows": [],
    }
    print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {report['device']}; load {report['load']}")
    print("; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    scene, judge = Scene(MODEL, Windows(cut, "prose"), given.device), Judge(MODEL, measured, given.device)
    started = time.perf_counter()
    scene.statistics()
    report["calibrate_seconds"] = time.perf_counter() - started
    print(f"{windows} windows of calibration; halfbyte calibrate took {report['calibrate_seconds']:.1f} s")
    zero = {kind: judge.figures(kind, {}) for kind in texts.KINDS}
    report["source"] = {kind: one["perplexity"]["value"] for kind, one in zero.items()}
    print(f"unquantized: prose {report['source']['prose']:.3f}, code {report['source']['code']:.3f}")
    print(COLUMNS, flush=True)
    for recipe in recipes():
        if not re.search(given.rows, f"{recipe.format} {recipe.name}") or time.perf_counter() - began > given.limit:
            continue
        try:
            row = measure(recipe, scene, judge)
        except Exception as error:
            report["rows"].append({"name": recipe.name, "format": recipe.format, "failed": repr(error)})
            print(f"{recipe.format} {recipe.name}: {error!r}", flush=True)
            continue
        done = [one for one in report["rows"] if "failed" not in one]
        report["rows"].append(row)
        print(line_of(row, [*done, row]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(report, indent=1))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
