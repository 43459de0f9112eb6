"""What the headroom of Optimal gains on real weights, and what it costs, beside Optimal(headroom=1).

    python -m benchmarks.headroom [--weights PATH] [--rounds 9]

The gain: squared error of every linear layer of a model (MiniLM, which is fetched once, if no other is given), with one
tensor scale per matrix and with one per row, under TransformerEngine's contract. The cost: whole calls on one thread,
on normal data from numpy's default_rng(0), the two methods in turns; least and median processor time of the thread.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import safe_open

import halfbyte as hb
from examples import minilm
from halfbyte.contracts.spec import Scaling
from halfbyte.methods import Method

CONTRACT = "transformer_engine"
FIXED, CHOSEN = hb.Optimal(headroom=1), hb.Optimal()
SHAPES = ((16, 16), (64, 64), (256, 128), (512, 512), (4096, 4096))
ROWS = (2048, 4096)
"""A matrix with a scale for each row."""


def gains(path: Path, scaling: Scaling) -> dict[tuple[int, int], list[tuple[float, float]]]:
    """Squared errors with headroom 1 and with the best one, of every matrix, by its shape."""
    found: dict[tuple[int, int], list[tuple[float, float]]] = {}
    with safe_open(path, "pt") as file:
        for name in file.keys():  # noqa: SIM118
            x = file.get_tensor(name)
            if x.ndim != 2 or "embed" in name or x.shape[1] % 16:
                continue
            one, best = (
                hb.quantize(x, "nvfp4", CONTRACT, method, scaling=scaling).error(x).squared
                for method in (FIXED, CHOSEN)
            )
            found.setdefault(tuple(x.shape), []).append((one, best))
    return found


def call_times(call: Callable[[Method], object], rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each call with headroom 1 and with the best one, in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        for method, own in zip((FIXED, CHOSEN), times, strict=True):
            begun = time.thread_time()
            call(method)
            own.append(time.thread_time() - begun)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description="what the headroom of Optimal gains and costs")
    parser.add_argument("--weights", type=Path, help="a safetensors file (default: MiniLM)")
    parser.add_argument("--rounds", type=int, default=9, help="calls of each kind for a large tensor")
    options = parser.parse_args()
    if options.weights is None:
        minilm.fetch()
    path = options.weights or minilm.SOURCE / "model.safetensors"
    scalings: tuple[Scaling, ...] = ("tensor", "row")
    for scaling in scalings:
        by_shape = gains(path, scaling)
        pairs = np.array([pair for found in by_shape.values() for pair in found])
        print(f"scaling {scaling}: {1 - pairs[:, 1].sum() / pairs[:, 0].sum():.2%} less squared error in all")
        for (rows, columns), found in by_shape.items():
            each = [1 - best / one for one, best in found]
            print(f"  {len(each):3d} of {rows} x {columns}: {min(each):.2%} to {max(each):.2%}")
    cases: list[tuple[tuple[int, int], Scaling]] = [*((shape, "tensor") for shape in SHAPES), (ROWS, "row")]
    for (rows, columns), scaling in cases:
        normal = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
        for dtype in (ml_dtypes.bfloat16, np.float32):
            x = normal.astype(dtype)
            rounds = max(options.rounds, min(1000, (1 << 24) // x.size))
            call = functools.partial(_call, x, scaling)
            one, best = call_times(call, rounds)
            ratio, usual = min(best) / min(one), statistics.median(best) / statistics.median(one)
            name = f"{rows} x {columns} {np.dtype(dtype).name}, scaling {scaling}"
            print(f"{name}: {1e6 * min(one):.0f} us, x {ratio:.2f} ({usual:.2f})")


def _call(x: np.ndarray[tuple[int, int], np.dtype[np.generic]], scaling: Scaling, method: Method) -> object:
    return hb.quantize(x, "nvfp4", CONTRACT, method, threads=1, scaling=scaling)


if __name__ == "__main__":
    main()
