"""What quantization costs a sentence encoder: all-MiniLM-L6-v2 by every method, on prose and on code.

    python -m benchmarks.quality_embeddings [--device cuda] [--peers] [--quick] [--rows REGEX] [--json FILE]

Passages of 126 tokens; statistics of 256 passages of prose, embeddings of 128 others of prose and of Python source.
"error" is the mean squared error of embeddings (mean of the last layer's vectors, scaled to length 1) relative to
their variance over passages, in percent; "cosine" the mean cosine with the source's embedding. "of the loss": how much
of amax's error on prose a row gives back. W4A4 rounds activations as `benchmarks.quality` does. All in float32.
`halfbyte calibrate` runs decoders; here hooks collect the same second moments. --peers adds other tools' GPTQ on them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks import texts
from benchmarks.machine import describe_machine, describe_versions, distribution_version, load_average
from benchmarks.quality import rounding_for, weight_error
from benchmarks.quality_recipes import Recipe, Scene, SkippedError, Values, recipes
from examples import minilm
from examples.bert import WordPiece
from halfbyte.calibration.evaluation import Interval, Rounding, interval
from halfbyte.calibration.moments import Moments
from halfbyte.calibration.tokens import Windows
from halfbyte.statistics import LinearStatistics

LENGTH = 126
"""Tokens of a passage, without the two marks around it."""
BATCH = 32
F64 = npt.NDArray[np.float64]


class EncoderScene(Scene):
    """MiniLM with its linear weights and the statistics of their inputs on passages."""

    def __init__(self, source: Path, passages: torch.Tensor, device: str) -> None:
        super().__init__(source, Windows(passages.numpy(), "passages"), device)
        self.encoder = Encoder(source, self.device)
        self._known: dict[str, LinearStatistics] = {}
        moments: dict[str, Moments] = {}

        def add(name: str, x: torch.Tensor) -> None:
            moments.setdefault(name, Moments(x.shape[1], "full", x.device)).add(x)

        self.encoder.run(passages, {}, dict.fromkeys(self.weights, add))
        self._known = {name: one.finish() for name, one in moments.items()}

    def known(self, name: str) -> LinearStatistics:
        return self._known[name]

    def inputs(self) -> dict[str, list[str]]:
        """q, k and v have one input; every other layer has its own."""
        found: dict[str, list[str]] = {}
        for name in self.weights:
            first = next((one for one in self.groups.get(name, (name,)) if one in found), name)
            found.setdefault(first, []).append(name)
        return found


Visit = Callable[[str, torch.Tensor], object]


class Encoder:
    """The model, run with other values of its linear weights."""

    def __init__(self, source: Path, device: torch.device) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        self.device = device
        self.model = transformers.AutoModel.from_pretrained(source, dtype=torch.float32).to(device).eval()
        self.modules = dict(self.model.named_modules())

    def run(
        self, passages: torch.Tensor, values: Values, visits: dict[str, Visit], rounding: Rounding | None = None
    ) -> F64:
        """Embeddings of passages, (passages, width). visits: linear layer → what is to see its inputs."""
        before = {name: self.modules[name].weight.data for name in values}
        handles = [self.modules[name].register_forward_pre_hook(_seen(name, visit)) for name, visit in visits.items()]
        if rounding is not None:
            handles += [
                module.register_forward_pre_hook(_rounded(name, rounding))
                for name, module in self.modules.items()
                if rounding.quantized(name)
            ]
        try:
            for name, weight in values.items():
                self.modules[name].weight.data = weight
            with torch.no_grad():
                parts = [self.model(batch.to(self.device)).last_hidden_state for batch in torch.split(passages, BATCH)]
        finally:
            for handle in handles:
                handle.remove()
            for name, weight in before.items():
                self.modules[name].weight.data = weight
        found = torch.cat(parts).double().mean(dim=1)
        return np.asarray((found / found.norm(dim=1, keepdim=True)).cpu().numpy(), np.float64)


def _seen(name: str, visit: Visit) -> Callable[[Any, tuple[torch.Tensor, ...]], None]:
    def hook(module: Any, given: tuple[torch.Tensor, ...]) -> None:
        visit(name, given[0].flatten(0, -2))

    return hook


def _rounded(name: str, rounding: Rounding) -> Callable[[Any, tuple[torch.Tensor, ...]], tuple[torch.Tensor, ...]]:
    def hook(module: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        found = rounding(name, given[0].flatten(0, -2), False)
        return given if found is None else (found.reshape(given[0].shape), *given[1:])

    return hook


def passages_of(kind: str, source: Path, count: int, skip: int = 0) -> torch.Tensor:
    """(count, LENGTH + 2): passages that follow one another in a text."""
    tokenizer = WordPiece(source / "vocab.txt")
    ids: list[int] = []
    for line in texts.fetch(kind).read_text(encoding="utf-8").splitlines():
        ids += tokenizer.encode(line)[1:-1]
        if len(ids) >= (skip + count) * LENGTH:
            break
    cut = torch.tensor(ids[skip * LENGTH : (skip + count) * LENGTH]).reshape(-1, LENGTH)
    first, last = (torch.full((len(cut), 1), tokenizer.numbers[mark]) for mark in ("[CLS]", "[SEP]"))
    return torch.cat([first, cut, last], dim=1)


def figures(found: F64, wanted: F64) -> dict[str, Any]:
    """Error and cosine of embeddings, with intervals over passages, and the error of each passage."""
    spread = float(((wanted - wanted.mean(axis=0)) ** 2).sum(axis=1).mean())
    errors = ((found - wanted) ** 2).sum(axis=1) / spread
    numbers = {"error": interval(errors), "cosine": interval((found * wanted).sum(axis=1))}
    return {name: _as_json(one) for name, one in numbers.items()} | {"passages": errors.round(8).tolist()}


def _as_json(one: Interval) -> dict[str, float]:
    return {"value": one.value, "low": one.low, "high": one.high}


Tests = dict[str, tuple[torch.Tensor, F64]]
"""Kind of text → passages, and the source's embeddings of them."""


def measure(recipe: Recipe, scene: EncoderScene, tests: Tests) -> dict[str, Any]:
    """All figures of one row."""
    began = time.perf_counter()
    values = recipe.make(scene)
    found: dict[str, Any] = {"name": recipe.name, "format": recipe.format, "seconds": time.perf_counter() - began}
    found["weight_error"] = weight_error(scene, values)
    for kind, (passages, wanted) in tests.items():
        found[kind] = figures(scene.encoder.run(passages, values, {}), wanted)
        rounding = rounding_for(scene, recipe.format)
        found[f"{kind}_w4a4"] = figures(scene.encoder.run(passages, values, {}, rounding), wanted)
    return found


def encoder_recipes() -> list[Recipe]:
    """The rows that need no decoder."""
    return [one for one in recipes() if not one.smooth and not one.sequential]


def line_of(row: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """A row of the table, in Markdown."""
    if "skipped" in row:
        return f"| {row['format']} {row['name']} | skipped: {row['skipped']} |"
    base = next((one for one in rows if one["name"] == "amax" and one["format"] == row["format"]), row)
    cells = [f"{100 * row['weight_error']:.1f} %"]
    for part in ("prose", "code", "prose_w4a4", "code_w4a4"):
        error, lost = (100 * one[part]["error"]["value"] for one in (row, base))
        low, high = (100 * row[part]["error"][end] for end in ("low", "high"))
        cells.append(f"{error:.2f} ({low:.2f}–{high:.2f})")
        if part.startswith("prose"):
            cells += [f"{100 * (1 - error / lost):.0f} %", f"{row[part]['cosine']['value']:.5f}"]
    return f"| {row['format']} {row['name']} | {' | '.join(cells)} | {row['seconds']:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--peers", action="store_true", help="other tools' GPTQ on the same statistics too")
    parser.add_argument("--quick", action="store_true", help="16 passages to calibrate, 8 to measure on")
    parser.add_argument("--rows", default="", help="only rows whose format and name match this expression")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    minilm.fetch()
    count = 16 if given.quick else 256
    scene = EncoderScene(minilm.SOURCE, passages_of("prose", minilm.SOURCE, count, count), given.device)
    tests: Tests = {}
    for kind in texts.KINDS:
        passages = passages_of(kind, minilm.SOURCE, count // 2)
        tests[kind] = passages, scene.encoder.run(passages, {}, {})
    names = ("torch", "transformers", *(("qwantize", "llmcompressor", "compressed-tensors") if given.peers else ()))
    report: dict[str, Any] = {
        "command": " ".join(sys.argv[1:]),
        "machine": describe_machine(),
        "versions": describe_versions(False) | {name: distribution_version(name) for name in names},
        "load": load_average(),
        "passages": {"calibration": count, "measured": count // 2, "length": LENGTH},
        "rows": [],
    }
    print("; ".join(f"{name} {version}" for name, version in report["versions"].items()))
    heads = ["error of weights", "error, prose", "of the loss", "cosine", "error, code", "W4A4, prose", "of the loss",
             "cosine", "W4A4, code", "seconds"]  # fmt: skip
    print(f"| | {' | '.join(heads)} |", f"|---|{'--:|' * len(heads)}", sep="\n", flush=True)
    chosen = encoder_recipes()
    if given.peers:
        from benchmarks.quality_peers import layer_recipes

        chosen += layer_recipes()
    for recipe in chosen:
        if not re.search(given.rows, f"{recipe.format} {recipe.name}"):
            continue
        try:
            row = measure(recipe, scene, tests)
        except SkippedError as reason:
            row = {"name": recipe.name, "format": recipe.format, "skipped": str(reason)}
        report["rows"].append(row)
        print(line_of(row, report["rows"]), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(report))


if __name__ == "__main__":
    main()
