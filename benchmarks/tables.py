"""Print the report of a benchmark as tables."""

from __future__ import annotations

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

Record = dict[str, Any]

BUSY = 0.8
"""If calls with several threads had less than this share of their cores, other processes disturbed the result."""


def print_header(console: Console, report: Record) -> None:
    """Print the machine, the versions and the load."""
    machine = report["machine"]
    model = f" (family/model {machine['cpu_family_model']})" if machine["cpu_family_model"] else ""
    virtual = ", virtual machine" if machine["hypervisor"] else ""
    lines = [
        f"{machine['cpu']}{model}, {machine['cores']} cores{virtual}, {machine['memory_gb']} GB; {machine['system']}",
        f"has {' '.join(machine['instruction_sets'])}; caches {', '.join(machine['caches'])}",
        f"memory copy, one thread: {machine['copy_gb_s']} GB/s; huge pages: {machine['huge_pages']}",
        "; ".join(f"{name} {version}" for name, version in report["versions"].items()),
        f"load average at start: {_load(report['load']['start'])}",
    ]
    console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)


def print_operations(console: Console, report: Record) -> None:
    """Print our operations: one line each, with two columns per instruction set and thread count."""
    settings, records = report["settings"], report["operations"]
    table = Table(
        title=f"{settings['rows']}×{settings['columns']} {settings['dtype']}, {settings['buffers']} buffers, results on"
        f" {settings['memory']} memory; amax given",
        caption="GB/s of input, best call; × memcpy with as many threads. calls: fewest of the row.",
    )
    table.add_column("operation", no_wrap=True)
    table.add_column("rows", justify="right")
    variants = [(isa, threads) for isa in settings["isas"] for threads in settings["threads"]]
    for isa, threads in variants:
        table.add_column(f"{isa} {threads}T\nGB/s", justify="right")
        table.add_column("×\nmemcpy", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("bits")
    for name in dict.fromkeys(record["name"] for record in records):
        of_name = [record for record in records if record["name"] == name]
        if "reason" in of_name[0]:
            table.add_row(name, "", *[""] * (2 * len(variants) + 1), of_name[0]["reason"])
            continue
        cells = []
        for isa, threads in variants:
            found = [r for r in of_name if r["threads"] == threads and r["isa"] in (isa, "any")]
            cells += [f"{found[0]['gb_s']:.2f}", f"{found[0]['x_memcpy']:.2f}"]
        bits = "equal" if all(record["bits"] == "equal" for record in of_name) else "DIFFER"
        calls = min(record["calls"] for record in of_name)
        table.add_row(name, str(of_name[0]["rows"]), *cells, str(calls), bits)
    console.print(table)
    copies = [r for r in records if r["name"] == "memcpy"]
    spread = "; ".join(f"{r['threads']}T best {r['gb_s']:.2f}, median {r['median_gb_s']:.2f} GB/s" for r in copies)
    console.print(f"memcpy {spread}: if these differ, the ratios are a range.", highlight=False)
    several = [r["cores"] / r["threads"] for r in records if r.get("threads", 1) > 1]
    if several and statistics.median(several) < BUSY:
        console.print(
            f"NOT A RESULT for several threads: half of those calls had less than {statistics.median(several):.0%} of "
            "their cores; other processes were running."
        )


def print_scaling(console: Console, scaling: Record) -> None:
    """Print the speed by size and by threads."""
    table = Table(title=f"Plain NVFP4 by size, {scaling['isa']}, one thread")
    for column in ("MB", "GB/s", "ns / element", "× the first", "bits"):
        table.add_column(column, justify="right")
    for record in scaling["sizes"]:
        cells = [f"{record['gb_s']:.2f}", f"{record['ns_per_element']:.3f}", f"{record['x_first']:.2f}"]
        table.add_row(str(record["megabytes"]), *cells, record["bits"])
    console.print(table)
    if scaling["skipped_megabytes"]:
        console.print(f"no memory for {', '.join(map(str, scaling['skipped_megabytes']))} MB")
    table = Table(
        title="Two threads against one, and the fixed cost of a call",
        caption="Speed-up of the kernels that memory does not bound, with the cores that the two threads really had;"
        " µs of a call on 16×32 elements, one thread.",
    )
    isas = list(dict.fromkeys(record["isa"] for record in scaling["two_threads"]))
    table.add_column("operation", no_wrap=True)
    for isa in isas:
        table.add_column(f"{isa} 2T/1T", justify="right")
    table.add_column("µs per call", justify="right")
    for name, cost in scaling["call_us"].items():
        found = {
            r["isa"]: f"{r['speed_up']:.2f}× on {r['cores']:.2f}" for r in scaling["two_threads"] if r["name"] == name
        }
        table.add_row(name, *(found.get(isa, "") for isa in isas), f"{cost:.0f}")
    console.print(table)


def print_peers(console: Console, peers: Record) -> None:
    """Print each peer with our call."""
    isas = list(peers["pairs"][0]["ours"]) if peers["pairs"] else []
    table = Table(
        title="Peers and ours on the same rows, which both find in the cache",
        caption="GB/s of input, best call; ratio = ours / peer on the same rows; whole = ours on the whole, cold tensor"
        " (first table) / peer on these rows.\nequal*: ours searches exactly and equals our reference; the peer equals"
        " our contract of it. amax: who is given the tensor's amax, or computes it in the timed call.",
    )
    table.add_column("peer")
    table.add_column("rows", justify="right")
    table.add_column("T", justify="right")
    table.add_column("amax")
    table.add_column("peer\nGB/s", justify="right")
    for isa in isas:
        table.add_column(f"{isa}\nGB/s", justify="right")
        table.add_column("ratio", justify="right")
        table.add_column("whole", justify="right")
    table.add_column("calls", justify="right")
    table.add_column("bits")
    for pair in peers["pairs"]:
        cells = []
        for isa in isas:
            ours = pair["ours"][isa]
            whole = "" if ours["ratio_whole"] is None else f"{ours['ratio_whole']:.0f}×"
            cells += [f"{ours['gb_s']:.3g}", f"{ours['ratio']:.0f}×", whole]
        bits = ("equal*" if pair["mirrored"] else "equal") if pair["bits"] == "equal" else "DIFFER"
        rate = f"{pair['peer']['gb_s']:.3g}"
        calls = str(pair["peer"]["calls"])
        table.add_row(pair["name"], str(pair["rows"]), str(pair["threads"]), pair["amax"], rate, *cells, calls, bits)
    console.print(table)
    for name, reason in peers["missing"].items():
        console.print(f"{name}: {reason}", markup=False)


def print_end(console: Console, report: Record) -> None:
    """Print the load, the time, and everything that is wrong."""
    load = report["load"]
    console.print(
        f"load average {_load(load['start'])} at start, {_load(load['end'])} at end; {report['seconds']} s",
        highlight=False,
    )
    wrong = report["bits"]["differences"]
    if not wrong:
        against = "the reference's and the peers'" if report.get("peers", {}).get("pairs") else "the reference's"
        console.print(f"bits: what was timed equals {against}")
    for text in wrong:
        console.print(f"WRONG BITS: {text}", markup=False, soft_wrap=True)


def _load(values: list[float]) -> str:
    return " ".join(map(str, values)) or "unknown"
