"""The speed of the CPU kernels, compared with memcpy and the peers, by size and by threads. Checks the bits it timed.

    python benchmarks/cpu.py                  about three minutes
    python benchmarks/cpu.py --quick          smaller tensor, fewer rounds
    python benchmarks/cpu.py --only Optimal --no-peers --no-scaling

GB/s counts bytes of the tensor in --dtype, also for dequantize, whatever it decodes to. Every operation is timed once
per round, in a new order in each round. The operations alternate between several buffers, so that no input is in the
cache. The table shows the best call; medians are in the JSON. Kernels are given the tensor's amax; the pass that finds
the amax is a separate row. Exit status 1: some result differs from that of the reference or of the peer.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # when run as a file, the repository is not on the path

import numpy as np
from rich.console import Console

import halfbyte as hb
from benchmarks import machine, operations, peers, tables
from benchmarks.machine import Array, Timed, run_rounds
from benchmarks.operations import ANY, Inputs, Operation
from conformance.peers.spec import quiet
from halfbyte.backends.cpu.library import ISAS
from halfbyte.codec.bits import DTYPES

Record = dict[str, Any]

POOL_BYTES = 192 << 20
"""The total size of the buffers: several times a usual L3 cache."""


@dataclass(frozen=True)
class Plan:
    """How much is measured."""

    rows: int
    seconds: float
    """Time for our operations, and the same again for the peers. The section on sizes gets a sixth of it."""
    rounds: tuple[int, int]
    slowest: float
    """The longest time for one call; slower operations get fewer rows."""
    sizes: tuple[int, ...]
    peer_rows: int
    slow_peer_rows: int


FULL = Plan(4096, 90, (3, 100), 0.15, (64, 256, 1024), 512, 128)
QUICK = Plan(1024, 6, (2, 12), 0.03, (64, 256), 128, 16)


@machine.kept_settings()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write the report. Returns 1 if a bit is wrong."""
    options = parse(arguments)
    plan = QUICK if options.quick else FULL
    rows, seconds = options.rows or plan.rows, options.seconds or plan.seconds
    reused = options.memory == "reused" and machine.reuse_memory()
    console = Console(width=None if sys.stdout.isatty() else 150)
    started = time.perf_counter()
    report: Record = {
        "machine": machine.describe_machine(),
        "versions": machine.describe_versions(options.peers),
        "load": {"start": machine.load_average()},
    }
    tables.print_header(console, report)
    isas = machine.instruction_sets(options.isa)
    size = rows * options.columns * DTYPES[options.dtype].itemsize
    inputs = operations.make_inputs(rows, options.columns, options.dtype, min(max(-(-POOL_BYTES // size), 2), 16))
    report["settings"] = {
        "rows": rows, "columns": options.columns, "dtype": options.dtype, "threads": options.threads, "isas": isas,
        "buffers": len(inputs.buffers), "memory": "reused" if reused else "fresh", "quick": options.quick,
        "seconds": seconds, "data": "gaussian, standard deviation 0.02",
    }  # fmt: skip
    wanted = [op for op in operations.make_operations(inputs) if not op.ours or options.only.lower() in op.name.lower()]
    report["operations"], wrong = time_operations(inputs, wanted, isas, options.threads, plan, seconds)
    tables.print_operations(console, report)
    if options.scaling:
        sizes = options.sizes or plan.sizes
        report["scaling"], found = time_sizes(inputs, sizes, isas[0], seconds / 6, plan.rounds)
        report["scaling"]["two_threads"] = two_threads(report["operations"], wanted)
        wrong += found
        tables.print_scaling(console, report["scaling"])
    if options.peers:
        slices = [(plan.peer_rows, False), *([(rows, True)] if options.full else [])]
        pairs, missing = peers.make_pairs(inputs, plan.slow_peer_rows)
        report["peers"] = {"pairs": [], "missing": missing}
        for threads in options.peer_threads:
            for count, whole in slices:
                chosen = [pair for pair in pairs if pair.whole() or not whole]
                records, found = time_peers(inputs, chosen, isas, threads, min(count, rows), seconds)
                report["peers"]["pairs"] += records
                wrong += found
        compare_with_wholes(report["peers"]["pairs"], report["operations"])
        tables.print_peers(console, report["peers"])
    report["load"]["end"] = machine.load_average()
    report["seconds"] = round(time.perf_counter() - started, 1)
    report["bits"] = {"differences": wrong}
    tables.print_end(console, report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks/cpu.py", description=__doc__, formatter_class=lines)

    def names(text: str) -> list[str]:
        return text.split(",")

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    add = parser.add_argument
    add("--rows", type=int, help=f"rows of the tensor, a multiple of 16 ({FULL.rows}; quick: {QUICK.rows})")
    add("--columns", type=int, default=7168, help="columns, a multiple of 32 (7168)")
    add("--dtype", choices=sorted(DTYPES), default="bf16", help="dtype of the tensor (bf16)")
    add("--threads", type=numbers, default=[1, 2], help="thread counts, which must include 1 (1,2)")
    add("--isa", type=names, default=["avx2", "avx512"], help="instruction sets, if the machine has them (avx2,avx512)")
    add("--only", default="", metavar="TEXT", help="only operations whose name contains this text; memcpy always runs")
    add("--seconds", type=float, help=f"time for our operations ({FULL.seconds}; quick: {QUICK.seconds})")
    add("--quick", action="store_true", help="smaller tensor, fewer rounds: for a first look, not for results")
    add("--full", action="store_true", help="run the peers on the whole tensor too (takes some more minutes)")
    add("--no-peers", dest="peers", action="store_false", help="do not run the peers (nor torch)")
    add(
        "--peer-threads",
        type=numbers,
        default=[1],
        help="thread counts for the peers and for our calls next to them (1)",
    )
    add("--no-scaling", dest="scaling", action="store_false", help="do not run the section on sizes")
    add("--sizes", type=numbers, metavar="MB,MB", help="sizes for the scaling section (64,256,1024; quick: 64,256)")
    add(
        "--memory", choices=("reused", "fresh"), default="reused",
        help="reused: results land on memory that was used before, as memcpy's do; fresh: the C library's default, "
        "with page faults on large results (reused)",
    )  # fmt: skip
    add("--json", metavar="FILE", help="write all measurements to this file")
    options = parser.parse_args(arguments)
    if (options.rows or 16) % 16 or options.columns % 32 or options.columns < 32 or (options.rows or 16) < 16:
        parser.error("--rows must be a multiple of 16, --columns of 32")
    if 1 not in options.threads or min(options.threads + options.peer_threads) < 1:
        parser.error("--threads must include 1, and no count may be below 1")
    if unknown := set(options.isa) - set(ISAS):
        parser.error(f"--isa knows {', '.join(ISAS)}, not {', '.join(sorted(unknown))}")
    return options


def time_operations(
    inputs: Inputs, wanted: list[Operation], isas: list[str], threads: list[int], plan: Plan, seconds: float
) -> tuple[list[Record], list[str]]:
    """A record for every operation × instruction set × thread count, and the differences from the reference."""
    records: list[Record] = []
    timed: list[tuple[Operation, Record, Timed]] = []
    for operation in wanted:
        try:
            rows = fitting_rows(inputs, operation, isas[0], plan.slowest)
        except hb.UnsupportedError as error:
            records.append({"name": operation.name, "reason": str(error)})
            continue
        for isa in isas if operation.ours else [ANY]:
            for count in threads:
                record: Record = {"name": operation.name, "isa": isa, "threads": count, "rows": rows}
                record["bytes"] = inputs.x[:rows].nbytes
                records.append(record)
                timed.append((operation, record, variant(inputs.buffers, operation, isa, count, rows)))
    wrong = compare_wholes(timed)
    run_rounds([one for _, _, one in timed], len(inputs.buffers), seconds, plan.rounds)
    for _, record, one in timed:
        record |= one.rates(record["bytes"])
    copies = {record["threads"]: record for record in records if record["name"] == "memcpy"}
    for _, record, _ in timed:
        copy = copies[record["threads"]]
        record["x_memcpy"] = record["gb_s"] / copy["gb_s"]
        record["x_memcpy_median"] = record["median_gb_s"] / copy["median_gb_s"]
    expected: dict[str, dict[str, Array]] = {}
    for operation, record, one in timed:
        if operation.name not in expected:
            expected[operation.name] = operations.expected(operation, record["rows"])
        found = operations.differences(one.kept, expected[operation.name])
        record["bits"] = "differ" if found else "equal"
        wrong += [f"{operation.name}, {record['isa']}, {record['threads']} threads: {text}" for text in found]
    return records, wrong


def variant(buffers: list[Array], operation: Operation, isa: str, threads: int, rows: int) -> Timed:
    """An operation with one instruction set and thread count, ready to be timed."""
    slices = [buffer[:rows] for buffer in buffers]
    picked = operations.checked_rows(rows, operation.checked)
    return Timed(
        call=lambda buffer: operation.call(slices[buffer], buffer, threads),
        prepare=operations.prepare_for(isa),
        keep=lambda result: operations.sample(result, picked),
    )


def fitting_rows(inputs: Inputs, operation: Operation, isa: str, slowest: float) -> int:
    """The number of rows: all, or as many as one thread can do in the longest time for one call."""
    total = len(inputs.x)
    few = min(64, total)
    probe = variant(inputs.buffers, operation, isa if operation.ours else ANY, 1, few)
    run_rounds([probe], len(inputs.buffers), 0, (3, 3))
    return min(total, max(few, int(slowest / probe.best) * few))


def compare_wholes(timed: list[tuple[Operation, Record, Timed]]) -> list[str]:
    """Call everything once, untimed. All instruction sets and thread counts must give the same bytes."""
    sums: dict[str, int] = {}
    wrong = []
    for operation, record, one in timed:
        one.prepare(0)
        found = operations.checksum(one.call(0))
        if sums.setdefault(operation.name, found) != found:
            wrong.append(
                f"{operation.name}: {record['isa']}, {record['threads']} threads differs from the first variant"
            )
    return wrong


def two_threads(records: list[Record], wanted: list[Operation]) -> list[Record]:
    """How much faster two threads are, for operations that are not limited by memory."""
    bound = {operation.name for operation in wanted if operation.bound_by_memory}
    of = {(r["name"], r["isa"], r["threads"]): r for r in records if "gb_s" in r and r["name"] not in bound}
    return [
        {"name": name, "isa": isa, "cores": r["cores"], "speed_up": r["gb_s"] / of[name, isa, 1]["gb_s"]}
        for (name, isa, threads), r in of.items()
        if threads == 2
    ]


def time_sizes(
    inputs: Inputs, sizes: Sequence[int], isa: str, seconds: float, rounds: tuple[int, int]
) -> tuple[Record, list[str]]:
    """Time plain NVFP4 on one thread for several sizes (MB), and the fixed cost of a call."""
    columns, width = inputs.x.shape[1], inputs.x.dtype.itemsize
    measured: list[tuple[Record, Array, Timed]] = []
    skipped: list[int] = []
    for megabytes in sizes:
        rows = max(megabytes * 2**20 // (columns * width) // 16, 1) * 16
        if 2 * rows * columns * width > machine.available_memory() > 0:
            skipped.append(megabytes)
            continue
        x = np.resize(inputs.x, (rows, columns))
        plain = operations.plain(dataclasses.replace(inputs, buffers=[x]))
        measured.append(({"megabytes": megabytes, "bytes": x.nbytes}, x, variant([x], plain, isa, 1, rows)))
    run_rounds([one for _, _, one in measured], 1, seconds, rounds)
    wrong: list[str] = []
    for record, x, one in measured:
        plain = operations.plain(dataclasses.replace(inputs, buffers=[x]))
        found = operations.differences(one.kept, operations.expected(plain, len(x)))
        wrong += [f"plain, {record['megabytes']} MB: {text}" for text in found]
        record |= one.rates(x.nbytes) | {"ns_per_element": one.best / x.size * 1e9}
        record["x_first"] = record["gb_s"] / measured[0][0]["gb_s"]
        record["bits"] = "differ" if found else "equal"
    records = [record for record, _, _ in measured]
    return {"isa": isa, "sizes": records, "skipped_megabytes": skipped, "call_us": call_costs(inputs, isa)}, wrong


def call_costs(inputs: Inputs, isa: str) -> dict[str, float]:
    """The fixed cost of a call: microseconds of a call on a tensor of 16×32."""
    x = np.ascontiguousarray(inputs.x[:16, :32])
    small = dataclasses.replace(inputs, buffers=[x], weights=inputs.weights[:32], hessian=inputs.hessian[:2])
    timed = {op.name: variant([x], op, isa, 1, len(x)) for op in operations.make_operations(small) if op.ours}
    run_rounds([*timed.values()], 1, 0, (30, 30))
    return {name: round(one.best * 1e6, 1) for name, one in timed.items()}


def time_peers(
    inputs: Inputs, pairs: list[peers.Pair], isas: list[str], threads: int, rows: int, seconds: float
) -> tuple[list[Record], list[str]]:
    """Time each peer and our call on the same rows, which are in the cache. Returns a record for every pair."""
    import torch

    torch.set_num_threads(threads)
    measured: list[tuple[peers.Pair, Array, Timed, dict[str, Timed]]] = []
    for pair in pairs:
        x = inputs.x[: min(pair.rows or rows, rows)]
        measured.append((pair, x, *peer_variants(pair, x, isas, threads)))
    every = [one for _, _, peer, ours in measured for one in (peer, *ours.values())]
    with quiet():
        run_rounds(every, 1, 0, (1, 1))  # the first calls import, compile and allocate
        for one in every:
            one.forget()
        run_rounds(every, 1, seconds, (2, 100))
    records, wrong = [], []
    for pair, x, peer, ours in measured:
        record: Record = {
            "name": pair.name, "version": machine.distribution_version(pair.distribution), "threads": threads,
            "rows": len(x), "columns": x.shape[1], "amax": pair.amax, "same_as": pair.same_as,
            "mirrored": pair.mirrored, "peer": peer.rates(x.nbytes),
            "ours": {isa: one.rates(x.nbytes) | {"ratio": peer.best / one.best} for isa, one in ours.items()},
        }  # fmt: skip
        found = [f"{isa}: {text}" for isa, one in ours.items() for text in pair.check(x, one.kept, peer.kept)]
        record["bits"] = "differ" if found else "equal"
        wrong += [f"{pair.name}, {text}" for text in found]
        records.append(record)
    return records, wrong


def compare_with_wholes(pairs: list[Record], records: list[Record]) -> None:
    """Add to each pair the ratio of our speed on the whole tensor, not in the cache, to the peer's on the slice."""
    seconds = {(r["name"], r["isa"], r["threads"]): 1 / r["gb_s"] for r in records if "gb_s" in r}
    for pair in pairs:
        for isa, ours in pair["ours"].items():
            needed = [seconds.get((name, isa, pair["threads"])) for name in pair["same_as"]]
            known = [each for each in needed if each is not None]
            complete = needed and len(known) == len(needed)
            ours["ratio_whole"] = 1 / sum(known) / pair["peer"]["gb_s"] if complete else None


def peer_variants(pair: peers.Pair, x: Array, isas: list[str], threads: int) -> tuple[Timed, dict[str, Timed]]:
    """The peer's call, and our calls by instruction set. The slice is read before each call, so it is in the cache."""
    tensor, raw = peers.to_tensor(x), x.view(f"u{x.dtype.itemsize}")

    def prepared(isa: str) -> Any:
        choose = operations.prepare_for(isa)

        def prepare(buffer: int) -> None:
            choose(buffer)
            raw.max()

        return prepare

    ours = {isa: Timed(lambda buffer: pair.ours(x, threads), prepared(isa)) for isa in isas}
    return Timed(lambda buffer: pair.peer(tensor), prepared(ANY)), ours


if __name__ == "__main__":
    sys.exit(main())
