"""What quantization costs a language model: SmolLM2-135M by every method, on prose and on code.

    python -m benchmarks.quality [--device cuda] [--peers] [--quick] [--only-prose] [--rows REGEX] [--statistics DIR]
        [--json FILE]

Statistics are taken from windows of 1,024 tokens of prose from token 200,000 on. Perplexity, KL to the source model
and the share of equal likeliest tokens are measured on the first 64 windows of the prose and of Python source. "of the
loss" is how much of amax's loss in perplexity on prose a row gives back. W4A4 rounds activations to the format of
the weights as well; NVFP4 with input scales by the amax of calibration. All is computed in float32. --peers adds rows
of other tools, on the same tokens. --only-prose leaves out code and W4A4. A run that finds its --json file keeps the
rows that are in it.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import texts
from benchmarks.machine import describe_machine, describe_versions, distribution_version, load_average
from benchmarks.quality_recipes import Recipe, Scene, SkippedError, Values, recipes
from benchmarks.quality_tables import COLUMNS, line_of
from halfbyte.calibration.evaluation import Rounding, final_states, result_of, window_figures
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
PEERS = ("nvidia-modelopt", "llmcompressor", "compressed-tensors", "qwantize")


class Judge:
    """The unquantized model and its last states, to compare others with. rounds: whether W4A4 is measured too."""

    def __init__(
        self, source: Path, windows: int, device: str, kinds: Sequence[str] = texts.KINDS, rounds: bool = True
    ) -> None:
        self.source, self.device, self.rounds = source, device, rounds
        self.model = LayeredModel(open_weights(source), device)
        self.tokens: dict[str, torch.Tensor] = {}
        self.states: dict[str, States] = {}
        for kind in kinds:
            cut = texts.tokens(kind, source)[: windows * LENGTH].astype(np.int64)
            self.tokens[kind] = torch.from_numpy(cut[: len(cut) // LENGTH * LENGTH].reshape(-1, LENGTH))
            self.states[kind] = final_states(self.model, self.tokens[kind])

    def figures(
        self, kind: str, values: Values, rounding: Rounding | None = None, smoothing: Smoothing | None = None
    ) -> dict[str, Any]:
        """Of the model with other weights on a text. smoothing: factors in norms that belong to these weights.

        `windows` has losses and the KL of every window, for intervals of differences between rows.
        """
        tokens = self.tokens[kind]
        model = self.model if smoothing is None else LayeredModel(open_weights(self.source, smoothing), self.device)
        after = final_states(model, tokens, values, rounding)
        table = window_figures(self.model, self.states[kind], model, after, tokens)
        windows = {name: table[:, i].round(6).tolist() for i, name in enumerate(("loss", "source", "kl"))}
        return result_of(table, tokens.shape[1], "").as_json() | {"windows": windows}


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
        scene = scene.smoothed(recipe.activations, recipe.format)
    values = recipe.make(scene)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    found: dict[str, Any] = {"name": recipe.name, "format": recipe.format, "seconds": time.perf_counter() - began}
    found["cpu_seconds"] = time.process_time() - used
    found["weight_error"] = weight_error(scene, values)
    found["prose"] = judge.figures("prose", values, None, scene.smoothing)
    if recipe.code and "code" in judge.tokens:
        found["code"] = judge.figures("code", values, None, scene.smoothing)
    if recipe.activations and judge.rounds:
        found["prose_w4a4"] = judge.figures("prose", values, rounding_for(scene, recipe.format), scene.smoothing)
    return found


def row_of(recipe: Recipe, scene: Scene, judge: Judge) -> dict[str, Any]:
    """The row, or why there is none."""
    name = {"name": recipe.name, "format": recipe.format}
    try:
        return measure(recipe, scene, judge)
    except SkippedError as reason:
        return name | {"skipped": str(reason)}
    except Exception as error:
        return name | {"failed": repr(error)}


def started(file: Path | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of an earlier run with the same settings."""
    if file is None or not file.exists():
        return []
    old = json.loads(file.read_text())
    if old["settings"] != settings:
        raise SystemExit(f"{file} is of a run with {old['settings']}, this one has {settings}; name another file")
    return [row for row in old["rows"] if "prose" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", action="store_true", help="rows of other tools too")
    parser.add_argument("--quick", action="store_true", help="4 windows of calibration, 4 to measure on")
    parser.add_argument("--only-prose", action="store_true", help="nothing on code, nothing with rounded activations")
    parser.add_argument("--windows", type=int, default=128, help="of calibration")
    parser.add_argument("--measured", type=int, default=64, help="windows to measure on")
    parser.add_argument("--rows", default="", help="only rows whose format and name match this expression")
    parser.add_argument("--limit", type=float, default=1e9, help="start no row after this many seconds")
    parser.add_argument("--statistics", type=Path, help="folder for the statistics, to take them up in another run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if not (MODEL / "model.safetensors").exists():
        from tests.real import smollm2

        smollm2.fetch()
    windows, measured = (4, 4) if given.quick else (given.windows, given.measured)
    began = time.perf_counter()
    prose = texts.tokens("prose", MODEL)
    cut = prose[SKIP : SKIP + windows * LENGTH].astype(np.int64).reshape(-1, LENGTH)
    device = torch.cuda.get_device_name() if given.device.startswith("cuda") else "cpu"
    settings = {"calibration": windows, "measured": measured, "length": LENGTH, "skipped": SKIP, "device": device}
    kinds = ("prose",) if given.only_prose else texts.KINDS
    settings |= {"texts": list(kinds)} if given.only_prose else {}
    tools = ("torch", "transformers", "triton", *(PEERS if given.peers else ()))
    report: dict[str, Any] = {
        "command": " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "versions": describe_versions(False) | {name: distribution_version(name) for name in tools},
        "load": load_average(),
        "settings": settings,
        "rows": started(given.json, settings),
    }
    print(f"{report['machine']['cpu']}, {report['machine']['cores']} cores, {device}; load {report['load']}")
    print("; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    scene = Scene(MODEL, Windows(cut, "prose"), given.device, folder=given.statistics)
    judge = Judge(MODEL, measured, given.device, kinds, rounds=not given.only_prose)
    before = time.perf_counter()
    scene.statistics()
    report["calibrate_seconds"] = time.perf_counter() - before
    print(f"{windows} windows of calibration; halfbyte calibrate took {report['calibrate_seconds']:.1f} s")
    zero = {kind: judge.figures(kind, {}) for kind in kinds}
    if judge.rounds:
        zero["prose_w4a4"] = judge.figures("prose", {}, rounding_for(scene, "nvfp4"))
    report["source"] = {kind: one["perplexity"]["value"] for kind, one in zero.items()}
    print("unquantized: " + ", ".join(f"{kind} {value:.3f}" for kind, value in report["source"].items()))
    print(COLUMNS, flush=True)
    chosen = recipes()
    if given.peers:
        from benchmarks.quality_peers import peer_recipes

        chosen += peer_recipes()
    known = {(row["format"], row["name"]) for row in report["rows"]}
    for recipe in chosen:
        wanted = re.search(given.rows, f"{recipe.format} {recipe.name}") and time.perf_counter() - began < given.limit
        if not wanted or (recipe.format, recipe.name) in known:
            continue
        report["rows"].append(row_of(recipe, scene, judge))
        print(line_of(report["rows"][-1], report["rows"]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report))
    print(f"{time.perf_counter() - began:.0f} s in all")


if __name__ == "__main__":
    main()
