"""The speed of `halfbyte convert`, compared with `cp -r` and with an eager loop; by model size; and of large plans.

    python benchmarks/convert.py              a checkpoint of about 2.4 GB, a few minutes
    python benchmarks/convert.py --quick      a small one
    python benchmarks/convert.py --folder DIR --gigabytes 8
    python benchmarks/convert.py --cores --gigabytes 16 --folder /dev/shm --svg curve.svg

The source is in the page cache. `cp` and `convert` write to the same file system. Both are timed without waiting for
the disk (as cp ends) and, in separate rows, until everything is on the disk (convert syncs each shard; cp is followed
by `sync -f`). Dirty pages are flushed before each timing. Every row is the best of its rounds; the rounds are
interleaved, each in another order. The results are checked: the hashes of the manifest against the files, and the bits
against those of the eager loop.
`--cores` measures something else: the speed by the number of workers, beside as many `cp` at once.
Exit status 1: some bit is wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a file, the repository is not on the path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import cores, machine
from benchmarks.eager import convert_eagerly
from benchmarks.synthetic import Made, write_experts, write_holes
from conformance.peers.spec import quiet
from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute.hashes import TreeHash
from halfbyte.checkpoint.io.header import read_header

TE = Options(contract="transformer_engine", method="amax", rules=Rules(experts_only=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the report. Returns 1 if a bit is wrong."""
    options = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    report: dict[str, Any] = {
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(True),
        "load": {"start": machine.load_average()},
    }
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="halfbyte-bench-") as name:
        folder = Path(name)
        if options.cores is not None:
            return by_cores(folder, options, report, console)
        shards, experts = (4, 2) if options.quick else (max(4, round(options.gigabytes * 1e9 / 604e6)), 12)
        sizes = (256, 512) if options.quick else (2048, 4096)
        made = write_experts(folder / "source", shards, experts, *sizes)
        report["checkpoint"] = {"bytes": made.bytes, "tensors": made.tensors, "shards": shards}
        console.print(f"{made.bytes / 1e9:.2f} GB in {shards} shards, {made.tensors} tensors, in the page cache")
        report["speed"] = speeds(made, folder, options.rounds, options.workers)
        print_speeds(console, report["speed"])
        report["usual_way"] = usual_way(made, folder, options.rounds, options.workers)
        usual = report["usual_way"]
        console.print(
            f"load shard, torch eager, save: {usual['eager_gb_s']:.3f} GB/s; halfbyte the same bits: "
            f"{usual['ours_gb_s']:.2f} GB/s, {usual['ratio']:.0f}×; bits {'equal' if usual['equal'] else 'DIFFER'}"
        )
        report["linear"] = linear(folder, sizes, experts, shards, options.workers)
        for row in report["linear"]:
            console.print(f"{row['bytes'] / 1e9:6.2f} GB in {row['seconds']:6.2f} s, {row['gb_s']:.2f} GB/s")
        report["plan"] = large_plan(folder, *((4, 25) if options.quick else (60, 333)))
        large = report["plan"]
        console.print(
            f"plan of {large['tensors']:,} tensors, {large['bytes'] / 1e12:.2f} TB: {large['seconds']:.1f} s, "
            f"peak memory {large['peak_mb']:.0f} MB"
        )
    report["load"]["end"] = machine.load_average()
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if report["speed"]["hashes_equal"] and report["usual_way"]["equal"] else 1


def by_cores(folder: Path, options: argparse.Namespace, report: dict[str, Any], console: Console) -> int:
    """The curve over the number of workers. Returns 1 if two of them wrote other bytes."""
    processors = len(os.sched_getaffinity(0))
    workers = options.cores or [count for count in (1, 2, 4, 8, 16, 32, 64) if count <= processors]
    console.print(f"{report['machine']['cpu']}, {processors} processors; {report['versions']}")
    report["cores"] = curve = cores.measure(folder, options.gigabytes, workers, options.rounds, options.device)
    report["load"]["end"] = machine.load_average()
    cores.print_curve(console, curve)
    if options.svg is not None:
        title = f"halfbyte convert, {curve['bytes'] / 1e9:.0f} GB of BF16 experts, GB/s of source"
        options.svg.write_text(cores.draw(curve, title))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if curve["equal"] else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a small checkpoint")
    parser.add_argument("--gigabytes", type=float, default=2.4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument(
        "--folder", type=Path, default=None, help="where to work; default: the system's temporary folder"
    )
    parser.add_argument(
        "--cores",
        type=int,
        nargs="*",
        default=None,
        help="the curve over these numbers of workers; default: 1, 2, 4, …",
    )
    parser.add_argument("--device", default=None, help="with --cores: convert on this device too, cuda for example")
    parser.add_argument("--svg", type=Path, default=None, help="with --cores: write the plot here")
    parser.add_argument("--json", type=Path, default=None, help="write everything here")
    return parser.parse_args(arguments)


def timed(act: Callable[[], object], destination: Path) -> float:
    """Seconds of one call. Dirty pages are flushed and the destination is removed before."""
    shutil.rmtree(destination, ignore_errors=True)
    os.sync()
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def speeds(made: Made, folder: Path, rounds: int, workers: int) -> dict[str, Any]:
    """The best time, in seconds, of each way to copy or convert the whole checkpoint."""
    copy, out = folder / "copy", folder / "out"
    plans = {method: make_plan(made.path, Options(method=method)) for method in ("amax", "optimal")}

    def copy_files(sync: bool) -> None:
        subprocess.run(["cp", "-r", str(made.path), str(copy)], check=True)
        if sync:
            subprocess.run(["sync", "-f", str(copy)], check=True)

    def convert(method: str, sync: bool) -> None:
        run(plans[method], out, Resources(workers=workers, sync=sync))

    ways: dict[str, tuple[Callable[[], None], Path]] = {
        "cp -r": (lambda: copy_files(False), copy),
        "convert, amax": (lambda: convert("amax", False), out),
        "convert, optimal": (lambda: convert("optimal", False), out),
        "cp -r, on disk": (lambda: copy_files(True), copy),
        "convert, amax, on disk": (lambda: convert("amax", True), out),
    }
    subprocess.run(["cat", *map(str, made.path.iterdir())], check=True, stdout=subprocess.DEVNULL)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    listed = list(ways.items())
    for number in range(rounds):
        # Start each round with another one: memory that was just freed is faster than memory new from the host.
        for name, (act, destination) in listed[number % len(listed) :] + listed[: number % len(listed)]:
            seconds[name].append(timed(act, destination))
    equal = hashes_equal(out)
    shutil.rmtree(copy)
    shutil.rmtree(out)
    best = {name: min(found) for name, found in seconds.items()}
    rows = {
        name: {
            "best_s": best[name],
            "all_s": seconds[name],
            "gb_s": made.bytes / best[name] / 1e9,
            "x_cp": best["cp -r, on disk" if "on disk" in name else "cp -r"] / best[name],
        }
        for name in ways
    }
    return {"workers": workers, "rows": rows, "hashes_equal": equal}


def hashes_equal(folder: Path) -> bool:
    """Whether every tensor on disk has the hash that was computed while it was written."""
    shards = json.loads((folder / "halfbyte.json").read_text())["shards"]
    for name, shard in shards.items():
        with (folder / name).open("rb") as file:
            for info in read_header(folder / name).tensors.values():
                file.seek(info.start)
                tree = TreeHash(info.bytes)
                tree.add(0, np.frombuffer(file.read(info.bytes), np.uint8))
                if tree.text() != shard["tensors"][info.name]:
                    return False
    return bool(shards)


def print_speeds(console: Console, speed: dict[str, Any]) -> None:
    table = Table(f"{speed['workers']} workers", "seconds", "GB/s of source", "× cp")
    for name, row in speed["rows"].items():
        table.add_row(name, f"{row['best_s']:.2f}", f"{row['gb_s']:.2f}", f"{row['x_cp']:.2f}")
    console.print(table)


def usual_way(made: Made, folder: Path, rounds: int, workers: int) -> dict[str, Any]:
    """Convert one shard by the eager loop and by halfbyte, with the same bits.

    Both read from the page cache, and neither waits for the disk.
    """
    from safetensors.torch import load_file

    name = "model-00001-of-00001.safetensors"
    one = folder / "one"
    one.mkdir()
    first = sorted(path.name for path in made.path.glob("*.safetensors"))[0]
    shutil.copy(made.path / first, one / name)
    shutil.copy(made.path / "config.json", one)
    weight_map = dict.fromkeys(read_header(one / name).tensors, name)
    (one / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    theirs, ours = folder / "theirs", folder / "ours"
    with quiet():
        eager = min(timed(lambda: convert_eagerly(one, theirs, [name]), theirs) for _ in range(min(rounds, 2)))
    plan = make_plan(one, TE)
    resources = Resources(workers=workers, sync=False)
    seconds = min(timed(lambda: run(plan, ours, resources), ours) for _ in range(rounds))
    a, b = load_file(theirs / name), load_file(ours / name)
    equal = set(a) == set(b) and all(
        a[key].view(-1).view(dtype=_bytes()).equal(b[key].view(-1).view(dtype=_bytes())) for key in a
    )
    size = (one / name).stat().st_size
    for done in (one, theirs, ours):
        shutil.rmtree(done)
    return {
        "eager_gb_s": size / eager / 1e9,
        "ours_gb_s": size / seconds / 1e9,
        "ratio": eager / seconds,
        "equal": bool(equal),
    }


def _bytes() -> Any:
    import torch

    return torch.uint8


def linear(folder: Path, sizes: tuple[int, int], experts: int, shards: int, workers: int) -> list[dict[str, float]]:
    """The same model with a quarter, half and all of its layers."""
    rows = []
    source, out = folder / "part", folder / "part-out"
    resources = Resources(workers=workers, sync=False)
    for count in (max(1, shards // 4), max(2, shards // 2), shards):
        made = write_experts(source, count, experts, *sizes)
        plan = make_plan(source, Options(method="amax"))
        seconds = min(timed(partial(run, plan, out, resources), out) for _ in range(3))
        rows.append({"bytes": made.bytes, "seconds": seconds, "gb_s": made.bytes / seconds / 1e9})
        shutil.rmtree(source)
        shutil.rmtree(out)
    return rows


def large_plan(folder: Path, shards: int, experts: int) -> dict[str, float]:
    """Seconds and memory to plan a checkpoint that has only headers, measured in a separate process."""
    made = write_holes(folder / "holes", shards, experts)
    program = (
        "import sys, time; from pathlib import Path; from halfbyte.checkpoint import Options, make_plan\n"
        "began = time.perf_counter(); plan = make_plan(Path(sys.argv[1]), Options()); plan.fingerprint\n"
        "seconds = time.perf_counter() - began\n"
        "status = dict(line.split(':', 1) for line in Path('/proc/self/status').read_text().splitlines())\n"
        "print(seconds, int(status['VmHWM'].split()[0]) / 1e3)"
    )
    done = subprocess.run([sys.executable, "-c", program, str(made.path)], capture_output=True, text=True, check=True)
    seconds, peak = map(float, done.stdout.split())
    shutil.rmtree(made.path)
    return {"tensors": made.tensors, "bytes": made.bytes, "seconds": seconds, "peak_mb": peak}


if __name__ == "__main__":
    sys.exit(main())
