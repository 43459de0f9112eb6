"""The speed of a conversion by the number of workers, beside as many `cp` at once of the same bytes; and its plot."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.synthetic import PROJECTIONS, write_experts
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.quantize import quantize
from halfbyte.study.plots import FAINT, INK, line, svg, text

METHODS = ("amax", "optimal")
SHARDS = 10
COLOURS = {"cp": "#6b7280", "amax": "#c2410c", "optimal": "#15803d"}


def measure(
    folder: Path, gigabytes: float, workers: Sequence[int], rounds: int, device: str | None = None
) -> dict[str, Any]:
    """Source GB/s of `cp` and of both methods for each number of workers, and whether all wrote the same bytes.

    Nothing waits for the disk. Every figure is the best of its rounds; up to two workers have only the first one,
    because they take longest. device: where optimal is converted too, with the most workers.
    """
    expert = sum(2 * rows * columns for _, rows, columns in PROJECTIONS)
    made = write_experts(folder / "source", SHARDS, max(1, round(gigabytes * 1e9 / SHARDS / expert)))
    files = _cut(folder / "cut", made.bytes, max(workers))
    plans = {method: make_plan(made.path, Options(method=method)) for method in METHODS}
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(workers, math.inf) for name in ("cp", *METHODS)}
    on_device: list[float] = []
    first: dict[str, dict[str, Any]] = {}
    equal = True

    def convert(method: str, count: int, where: str) -> float:
        nonlocal equal
        out = folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        began = time.perf_counter()
        run(plans[method], out, Resources(count, sync=False, device=where))
        seconds = time.perf_counter() - began
        shards = json.loads((out / "halfbyte.json").read_text())["shards"]
        equal &= shards == first.setdefault(method, shards)
        return seconds

    search = {count: search_speed(count) for count in workers}
    for number in range(rounds):
        for count in workers:
            if number > 0 and count <= 2:
                continue
            seconds = {"cp": _copy(files, folder / "copy", count)}
            seconds |= {method: convert(method, count, "cpu") for method in METHODS}
            for name, found in seconds.items():
                best[name][count] = min(best[name][count], found)
        if device is not None:
            on_device.append(convert("optimal", max(workers), device))
    speed = {name: {count: made.bytes / s / 1e9 for count, s in row.items()} for name, row in best.items()}
    on_device = [made.bytes / seconds / 1e9 for seconds in on_device]
    return {
        "bytes": made.bytes, "shards": SHARDS, "gb_s": speed, "search_gb_s": search, "device": device,
        "device_gb_s": on_device, "equal": equal,
    }  # fmt: skip


def search_speed(count: int, seconds: float = 0.6) -> float:
    """GB/s of `count` processes that search the same scales for a matrix in their own cache, and touch nothing else."""
    results: Any = multiprocessing.get_context("fork").SimpleQueue()
    start: Any = multiprocessing.get_context("fork").Barrier(count)

    def work() -> None:
        x = np.random.default_rng(0).standard_normal((128, 2048)).astype(np.float32).astype(ml_dtypes.bfloat16)
        amax = float(np.abs(x.astype(np.float32)).max())
        out = quantize(x, "nvfp4", "modelopt", "optimal", global_amax=amax, threads=1)
        done = 0
        start.wait()
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            quantize(x, "nvfp4", "modelopt", "optimal", global_amax=amax, threads=1, out=out)
            done += x.nbytes
        results.put(done)

    processes = [multiprocessing.get_context("fork").Process(target=work) for _ in range(count)]
    for process in processes:
        process.start()
    found = sum(results.get() for _ in processes)
    for process in processes:
        process.join()
    return float(found / seconds / 1e9)


def _cut(folder: Path, size: int, count: int) -> list[Path]:
    """As many bytes as the source has, in `count` files, so that as many `cp` have one each."""
    folder.mkdir()
    block = np.random.default_rng(0).integers(0, 256, 1 << 24, dtype=np.uint8)

    def write(number: int) -> Path:
        path = folder / f"part-{number}"
        with path.open("wb") as file:
            for start in range(0, size // count, block.size):
                file.write(block[: size // count - start].data)
        return path

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(write, range(count)))


def _copy(files: Sequence[Path], folder: Path, count: int) -> float:
    """Seconds that `count` processes of cp take, each with its share of the files."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    began = time.perf_counter()
    running = [subprocess.Popen(["cp", *map(str, files[number::count]), str(folder)]) for number in range(count)]
    failed = sum(process.wait() != 0 for process in running)
    seconds = time.perf_counter() - began
    shutil.rmtree(folder)
    if failed:
        raise RuntimeError(f"cp into {folder} failed")
    return seconds


def print_curve(console: Console, curve: dict[str, Any]) -> None:
    speed, search = curve["gb_s"], curve["search_gb_s"]
    table = Table(
        "workers", "cp at once, GB/s", *(f"{name}, GB/s" for name in METHODS), "amax × cp", "optimal × linear",
        "search alone, GB/s", "× linear",
    )  # fmt: skip
    least = min(search)
    for count, cp in speed["cp"].items():
        amax, optimal = (speed[name][count] for name in METHODS)
        one = speed["optimal"][least] / least
        row = (cp, amax, optimal, amax / cp, optimal / (count * one), search[count])
        linear = search[count] / (count * search[least] / least)
        table.add_row(str(count), *(f"{value:.2f}" for value in (*row, linear)))
    console.print(f"{curve['bytes'] / 1e9:.1f} GB of BF16 experts in {curve['shards']} shards, from the page cache")
    console.print(table)
    best = {name: max(row.values()) for name, row in speed.items()}
    most = speed["cp"][max(speed["cp"])]
    console.print(
        f"best amax {best['amax']:.1f} GB/s, {best['amax'] / most:.2f} × cp at its most; "
        f"bits {'equal in all runs' if curve['equal'] else 'DIFFER'}; {os.cpu_count()} processors"
    )
    if curve["device_gb_s"]:
        found = max(curve["device_gb_s"])
        console.print(f"optimal on {curve['device']}: {found:.1f} GB/s, {found / most:.2f} × cp at its most")


def draw(curve: dict[str, Any], title: str) -> str:
    """The curve as SVG: workers on a binary axis, GB/s of source upwards."""
    speed: dict[str, dict[int, float]] = curve["gb_s"]
    counts = sorted(speed["cp"])
    left, right, top, bottom, width, height = 44, 90, 24, 36, 560, 300
    most = max(max(row.values()) for row in speed.values())
    step = 10 ** math.floor(math.log10(most)) / (1 if most / 10 ** math.floor(math.log10(most)) > 4 else 2)
    span = max(1.0, math.log2(counts[-1] / counts[0]))

    def at(count: int, value: float) -> tuple[float, float]:
        across = left + (width - left - right) * math.log2(count / counts[0]) / span
        return across, height - bottom - (height - top - bottom) * value / (math.ceil(most / step) * step)

    body = [f'<rect width="{width}" height="{height}" fill="#ffffff"/>', text(left, 14, title, size=12)]
    for number in range(math.ceil(most / step) + 1):
        _, y = at(counts[0], number * step)
        body += [line(left, y, width - right, y, FAINT), text(left - 6, y + 4, f"{number * step:g}", "end")]
    for count in counts:
        body.append(text(at(count, 0)[0], height - bottom + 16, str(count), "middle"))
    body.append(text((left + width - right) / 2, height - 4, "workers, or cp at once", "middle"))
    body.append(text(4, top + 6, "GB/s"))
    for name, row in speed.items():
        points = [at(count, row[count]) for count in counts]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        body += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in points]
        body.append(text(points[-1][0] + 8, points[-1][1] + 4, name, colour=COLOURS[name] if name != "cp" else INK))
    return svg(width, height, body, title) + "\n"
