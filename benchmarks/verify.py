"""`halfbyte verify --against` beside `convert` and `sha256sum`, on a checkpoint from the page cache.

python -m benchmarks.verify [--gigabytes 1.6] [--rounds 5] [--json FILE]

GB/s are of the source for convert and verify, and of the checkpoint for the hash pass. `sha256sum` runs once for each
shard, all at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.machine import describe_machine, describe_versions, load_average
from benchmarks.synthetic import HIDDEN, INNER, write_experts
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.io.index import open_checkpoint
from halfbyte.verify import verify
from halfbyte.verify.recorded import recorded_problems

METHODS = ("amax", "optimal")


def measure(
    folder: Path, shards: int, experts: int, rounds: int, hidden: int = HIDDEN, inner: int = INNER
) -> dict[str, Any]:
    """The best time of each act, in turns, and what follows from them."""
    made = write_experts(folder / "source", shards, experts, hidden, inner)
    seconds: dict[str, list[float]] = {}

    def time_of(name: str, act: Callable[[], object]) -> object:
        began = time.perf_counter()
        result = act()
        seconds.setdefault(name, []).append(time.perf_counter() - began)
        return result

    clean, stored = True, 0
    for _ in range(rounds):
        for method in METHODS:
            target = folder / method
            shutil.rmtree(target, ignore_errors=True)
            plan = make_plan(made.path, Options(method=method))
            workers = len(os.sched_getaffinity(0))
            time_of(f"convert, {method}", lambda: run(plan, target, Resources(workers=workers, sync=False)))  # noqa: B023
            report = time_of(f"verify, {method}", lambda: verify(target, made.path))  # noqa: B023
            clean = clean and not getattr(report, "problems", True)
            checkpoint, files = open_checkpoint(target), sorted(target.glob("*.safetensors"))
            stored = sum(file.stat().st_size for file in files)
            found = time_of("hash pass", lambda: list(recorded_problems(checkpoint, headers_only=False)))  # noqa: B023
            clean = clean and not found
            time_of("sha256sum", lambda: _sha256sum(files))  # noqa: B023
    best = {name: min(times) for name, times in seconds.items()}
    size = {name: stored if name in ("hash pass", "sha256sum") else made.bytes for name in best}
    return {
        "rows": {name: {"best_s": best[name], "gb_s": size[name] / best[name] / 1e9} for name in best},
        "verify_against_convert": {m: best[f"convert, {m}"] / best[f"verify, {m}"] for m in METHODS},
        "hash_against_sha256sum": best["sha256sum"] / best["hash pass"],
        "clean": clean,
    }


def _sha256sum(files: Sequence[Path]) -> None:
    """One process per file, all at the same time, as a user would start them on all cores."""
    running = [subprocess.Popen(["sha256sum", str(file)], stdout=subprocess.DEVNULL) for file in files]
    if any(process.wait() for process in running):
        raise RuntimeError("sha256sum failed")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=1.6, help="size of the source")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write the checkpoints (default: a temporary folder)")
    parser.add_argument("--json", type=Path, help="write the figures, the machine and the versions to this file")
    options = parser.parse_args(arguments)
    machine, versions, load = describe_machine(), describe_versions(peers=False), load_average()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {load}; halfbyte {versions['halfbyte']}")
    shards = max(2, int(machine["cores"]))
    experts = max(1, round(options.gigabytes * 1e9 / (shards * 3 * HIDDEN * INNER * 2)))
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), shards, experts, options.rounds)
    for name, row in found["rows"].items():
        print(f"  {name:20}{row['best_s']:9.3f} s{row['gb_s']:9.2f} GB/s")
    for method, ratio in found["verify_against_convert"].items():
        print(f"verify --against is {ratio:.2f} x convert, {method}")
    print(f"the hash pass is {found['hash_against_sha256sum']:.2f} x sha256sum on all cores")
    print("every check was clean" if found["clean"] else "A CHECK FOUND A PROBLEM")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "versions": versions, "load": load, **found}, indent=1))
    return 0 if found["clean"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
