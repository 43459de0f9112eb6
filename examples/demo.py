"""Quantize a few small tensors with every contract and method, and show the errors and the agreement with the peers.

The column "equals peer" is measured in this run: the golden vectors in conformance/vectors.zip, which the peers' own
code produced, are computed again and compared bit for bit.
"""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
from rich.table import Table

import halfbyte as hb
from halfbyte.cli.app import out
from halfbyte.cli.tables import print_table
from halfbyte.conform import load_vectors, run_vectors
from halfbyte.contracts import CONTRACTS, get_contract
from halfbyte.contracts.spec import defined_methods

VECTORS = Path(__file__).parent.parent / "conformance" / "vectors.zip"


def make_tensors(seed: int = 0) -> dict[str, npt.NDArray[np.generic]]:
    """Three bfloat16 tensors that are easy or hard for block scales in different ways."""
    generator = np.random.default_rng(seed)
    weight = generator.standard_normal((256, 512)) * 0.02
    heavy = generator.standard_t(4, (256, 512)) * 0.02
    channels = generator.standard_normal((256, 512)) * np.exp(generator.standard_normal(512))
    tensors = {"gaussian weight": weight, "heavy-tailed weight": heavy, "uneven channels": channels}
    return {name: value.astype(ml_dtypes.bfloat16) for name, value in tensors.items()}


def quantizers() -> list[tuple[str, str, str]]:
    """Every (format, contract, method) that can quantize."""
    found = []
    for format in hb.FORMATS:
        for name, make in CONTRACTS.items():
            rule = make().rules.get(format)
            methods = dict.fromkeys(method.name for method in defined_methods(rule)) if rule else {}
            if name != get_contract(None, hb.get_format(format)).name:
                methods.pop("optimal", None)  # nearly the same numbers under every contract: shown once per format
            found += [(format, name, method) for method in methods]
    return found


def measure(
    tensors: dict[str, npt.NDArray[np.generic]], format: str, contract: str, method: str
) -> tuple[float, list[float]]:
    """Stored bits per weight, and the relative root-mean-square error of each tensor."""
    stored_bits, elements, errors = 0, 0, []
    for x in tensors.values():
        q = hb.quantize(x, format, contract, method)
        stored = [part for part in (q.codes, q.scales, q.stored_scale) if part is not None]
        stored_bits += sum(8 * np.asarray(part).nbytes for part in stored)
        elements += x.size
        exact = x.astype(np.float64)
        error = np.asarray(hb.dequantize(q)).astype(np.float64) - exact
        errors.append(float(np.sqrt((error**2).sum() / (exact**2).sum())))
    return stored_bits / elements, errors


def golden_agreement() -> dict[tuple[str, str], Counter[str]]:
    """Counts of agreeing, differing and pending golden cases by (peer, format)."""
    vectors = load_vectors(VECTORS)
    report = run_vectors(vectors)
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry, result in zip(vectors, report.results, strict=True):
        counts.setdefault((entry["peer"], entry["format"]), Counter())[result.status] += 1
    return counts


def verdict(counts: Counter[str] | None) -> str:
    """Whether the golden cases of a peer and format agree."""
    if counts is None:
        return "[dim]no vectors[/]"
    compared = counts["agree"] + counts["differ"]
    if counts["differ"]:
        return f"[red]no: {counts['differ']} of {compared} cases differ[/]"
    return f"[green]yes[/], {compared} cases"


def main() -> None:
    started = time.perf_counter()
    tensors = make_tensors()
    agreement = golden_agreement()
    table = Table(title=f"halfbyte {hb.__version__}: three bfloat16 tensors of 256 × 512, relative error (RMS)")
    table.add_column("format")
    table.add_column("contract")
    table.add_column("method")
    table.add_column("bits per weight", justify="right")
    for name in tensors:
        table.add_column(name, justify="right")
    table.add_column("equals peer")
    last = ""
    for format, contract, method in quantizers():
        bits, errors = measure(tensors, format, contract, method)
        if last not in ("", format):
            table.add_section()
        last = format
        peer = "[dim]specification[/]" if contract == "ocp" else verdict(agreement.get((contract, format)))
        if method == "optimal":
            peer = "[dim]ours, exact[/]"
        table.add_row(format, contract, method, f"{bits:.3f}", *(f"{error:.2%}" for error in errors), peer)
    print_table(table, ("uneven channels", "heavy-tailed weight"))
    console = out()
    agreed = sum(count["agree"] for count in agreement.values())
    total = sum(sum(count.values()) for count in agreement.values())
    console.print(f"{agreed} of {total} golden cases agree bit for bit; {time.perf_counter() - started:.1f} s in all.")
    console.print("Next: .venv/bin/halfbyte conform conformance/vectors.zip")


if __name__ == "__main__":
    main()
