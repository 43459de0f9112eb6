"""How long a conversion takes on many nodes: a simulation, whose small end is compared with measured runs.

    python -m benchmarks.scale_sim              # both: the comparison with 1, 2 and 4 local ranks, then the tables
    python -m benchmarks.scale_sim --tables     # only the tables of docs/scale.md

The model: every shard is one task. A place (a rank, or a slot of a Ray node) works on one task at a time, at its own
speed at most; all places together move no more bytes per second than the storage. What the storage has is shared
evenly, and what one place cannot use goes to the others. Ranks get their shards beforehand, as `share_of` deals them
out; places of a cluster take the largest that is left.
"""

from __future__ import annotations

import argparse
import heapq
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

OUTPUT = 0.28125
"""Bytes written per byte of BF16 that is read: 4.5 of 16 bits."""
GB = 1e9
NODE = 9.8
"""GB/s of source of a node with 16 cores, optimal scales (docs/performance.md, conversion on many cores)."""
LINK = 5.0
"""GB/s between a node and the storage: an assumption."""
STORAGES = (20.0, 200.0)
"""GB/s of the storage for all nodes together: assumptions."""
TOLERANCE = 0.5
"""By how much a measured run may differ from the simulated one."""


@dataclass(frozen=True)
class Machine:
    """What shards are converted on."""

    speeds: Sequence[float]
    """GB/s of source of each place, if nothing else stops it."""
    storage: float = float("inf")
    """GB/s that the storage reads and writes for all of them."""
    cores: float = float("inf")
    """Places that can compute at the same time; more of them share."""
    start: float = 0.0
    """Seconds before a place begins."""


def makespan(sizes: Sequence[float], machine: Machine, dealt: bool) -> float:
    """Seconds until the last shard is done. sizes: GB of source. dealt: shares are fixed before (ranks)."""
    places = len(machine.speeds)
    order = sorted(sizes, reverse=True)
    queues: list[list[float]] = [[] for _ in range(places)]
    if dealt:
        loads = [(0.0, place) for place in range(places)]
        heapq.heapify(loads)
        for size in order:
            load, place = heapq.heappop(loads)
            queues[place].append(size)
            heapq.heappush(loads, (load + size, place))
    left = iter(order)
    work: dict[int, float] = {}

    def take(place: int) -> None:
        size = (queues[place].pop(0) if queues[place] else None) if dealt else next(left, None)
        if size is not None:
            work[place] = size

    for place in range(places):
        take(place)
    now = machine.start
    while work:
        rates = _rates({place: machine.speeds[place] for place in work}, machine)
        step = min(work[place] / rates[place] for place in work)
        now += step
        for place in list(work):
            work[place] -= step * rates[place]
            if work[place] <= 1e-9:
                del work[place]
                take(place)
    return now


def _rates(speeds: dict[int, float], machine: Machine) -> dict[int, float]:
    """GB/s of source of each place that works: its own, less what cores and storage do not give."""
    share = min(1.0, machine.cores / len(speeds))
    left, rates = machine.storage / (1 + OUTPUT), {}
    for number, (place, speed) in enumerate(sorted(speeds.items(), key=lambda item: item[1])):
        rates[place] = min(speed * share, left / (len(speeds) - number))
        left -= rates[place]
    return rates


# --- tables ---


def node_speed() -> float:
    """GB/s of source of a whole node: its cores, or its link."""
    return min(NODE, LINK / (1 + OUTPUT))


def estimate(terabytes: float, nodes: int, storage: float, shard: float = 5.0) -> float:
    """Seconds for a checkpoint on so many nodes, shards of that many GB."""
    count = max(1, round(terabytes * 1000 / shard))
    return makespan([terabytes * 1000 / count] * count, Machine([node_speed()] * nodes, storage), dealt=True)


def tables() -> str:
    lines = [f"| source | nodes | {' | '.join(f'storage {storage:.0f} GB/s' for storage in STORAGES)} |"]
    lines.append(f"|--:|--:|{'--:|' * len(STORAGES)}")
    for terabytes in (1, 10):
        for nodes in (1, 8, 64):
            cells = " | ".join(_time(estimate(terabytes, nodes, storage)) for storage in STORAGES)
            lines.append(f"| {terabytes} TB | {nodes} | {cells} |")
    lines += [
        "",
        "| 1 TB, 64 nodes, 200 GB/s: shards of | ranks | Ray | one node 4 × slower: ranks | Ray |",
    ]
    lines.append("|--:|--:|--:|--:|--:|")
    for shard in (50.0, 20.0, 10.0, 5.0, 1.0):
        sizes = [shard] * round(1000 / shard)
        even, slow = [node_speed()] * 64, [node_speed() / 4] + [node_speed()] * 63
        times = [makespan(sizes, Machine(speeds, 200.0), dealt) for speeds in (even, slow) for dealt in (True, False)]
        lines.append(f"| {shard:g} GB | {' | '.join(map(_time, times))} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


# --- the small end, measured ---


def write_source(folder: Path, shards: int, megabytes: int) -> list[float]:
    """A checkpoint of experts, one matrix per shard; the shards are of two sizes. GB of each."""
    from tests.checkpoint.toy import write_checkpoint

    generator = np.random.default_rng(0)
    rows = megabytes * 10**6 // (2 * 4096)
    values = generator.standard_normal((rows, 4096), np.float32).astype(ml_dtypes.bfloat16)
    tensors = {}
    for number in range(shards):
        tensors[f"model.layers.{number}.mlp.down_proj.weight"] = values[: rows if number % 2 else rows // 2]
    write_checkpoint(folder, tensors, {"num_hidden_layers": shards}, shards=shards)
    return [tensor.nbytes / GB for tensor in tensors.values()]


def measure(source: Path, destination: Path, ranks: int, method: str) -> float:
    """Seconds of so many local ranks of one thread each, from start to the last one's end."""
    command = [
        sys.executable,
        "-c",
        "from halfbyte.cli import app; app()",
        "convert",
        source,
        destination,
        "--method",
        method,
    ]
    options = ["--workers", "1", "--device", "cpu", "--quiet", "--world-size", ranks]
    begun = time.perf_counter()
    started = [subprocess.Popen([str(part) for part in (*command, *options, "--rank", rank)]) for rank in range(ranks)]
    if any(process.wait() for process in started):
        raise SystemExit("a rank failed")
    return time.perf_counter() - begun


PROBE = """
import hashlib, sys
with open(sys.argv[1], "rb", buffering=0) as source, open(sys.argv[2], "wb", buffering=0) as target:
    for _ in range(3):
        source.seek(0)
        while block := source.read(1 << 23):
            hashlib.sha256(block)
            target.write(block[: len(block) * 9 // 32])
"""
"""What a core does for about a second: read, hash, and write 0.28 bytes for each byte."""


def cores_for(processes: int, folder: Path) -> float:
    """As how many cores the machine works for so many processes that read, hash and write; others may use it too."""
    shards = sorted((folder / "source").glob("*.safetensors"), key=lambda path: -path.stat().st_size)[:processes]

    def seconds(count: int) -> float:
        begun = time.perf_counter()
        commands = [[sys.executable, "-c", PROBE, str(shard), str(folder / shard.stem)] for shard in shards[:count]]
        for process in [subprocess.Popen(command) for command in commands]:
            process.wait()
        took = time.perf_counter() - begun
        for shard in shards[:count]:
            (folder / shard.stem).unlink()
        return took

    return processes * seconds(1) / seconds(processes)


def compare(shards: int, megabytes: int, method: str, memory: Path | None) -> bool:
    """Measure 1, 2 and 4 ranks beside the simulation, in rounds; the best of each counts.

    The simulation gets the speed of one rank, the time that so many ranks take for a tiny source, and as how many cores
    the machine works for as many processes that read, hash and write.
    """
    counts, rounds = (1, 2, 4), 3
    times: dict[int, list[float]] = {count: [] for count in counts}
    cores: dict[int, list[float]] = {count: [] for count in counts}
    starts: dict[int, list[float]] = {count: [] for count in counts}
    with tempfile.TemporaryDirectory(dir=memory) as temporary:
        folder = Path(temporary)
        sizes = write_source(folder / "source", shards, megabytes)
        write_source(folder / "tiny", max(counts), 1)
        for _ in range(rounds):
            for count in counts:
                starts[count].append(measure(folder / "tiny", folder / "out", count, method))
                shutil.rmtree(folder / "out")
                cores[count].append(cores_for(count, folder))
                times[count].append(measure(folder / "source", folder / "out", count, method))
                shutil.rmtree(folder / "out")
    speed = sum(sizes) / (min(times[1]) - min(starts[1]))
    print(f"{len(sizes)} shards, {sum(sizes):.2f} GB: {speed:.2f} GB/s by one rank")
    print(
        "| ranks | cores found | start, s | measured, s | simulated, s | measured / simulated |\n"
        "|--:|--:|--:|--:|--:|--:|"
    )
    close = True
    for count in counts:
        found, start = statistics.median(cores[count]), min(starts[count])
        simulated = makespan(sizes, Machine([speed] * count, cores=found, start=start), dealt=True)
        ratio = min(times[count]) / simulated
        print(f"| {count} | {found:.1f} | {start:.2f} | {min(times[count]):.2f} | {simulated:.2f} | {ratio:.2f} |")
        close &= abs(ratio - 1) <= TOLERANCE
    return close


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", action="store_true", help="simulate only")
    parser.add_argument("--shards", type=int, default=16)
    parser.add_argument("--megabytes", type=int, default=200, help="of the larger shards")
    parser.add_argument("--method", default="optimal")
    chosen = parser.parse_args()
    shm = Path("/dev/shm")
    ok = chosen.tables or compare(chosen.shards, chosen.megabytes, chosen.method, shm if shm.is_dir() else None)
    print(tables())
    if not ok:
        raise SystemExit(f"a measured run differs from the simulation by more than {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
