"""Whole calls, as a user writes them: wall time beside the kernels' own time and beside torch, and the bits compared.

python -m benchmarks.calls [--cpu] [--json FILE]

On a machine with a card it needs torch and Triton alone; peers that are not installed are named. Wall time: calls back
to back, the device waited for at the end, best of several rounds in which all calls take turns. Kernels: the same call
captured in a CUDA graph and replayed, per call. Torch: `x.abs().amax(); x.clone()` on the same tensor in the same
rounds. Bits: the first and last rows against the numpy reference. --cpu: the table of benchmarks/calls_cpu.py instead.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import halfbyte as hb
from benchmarks.expected import rows_agree
from halfbyte import online
from halfbyte.checkpoint import Options, Rules
from halfbyte.testing import find_difference

Call = Callable[[], Any]

SHAPES = ((16, 6144), (16384, 6144))
EXPERTS, HIDDEN, INNER = 128, 2048, 768
CHECKED_ROWS = 4
ROUNDS = 7
GRAPH_CALLS, GRAPH_REPLAYS = 5, 15
TORCH = "torch: x.abs().amax(); x.clone()"


@dataclass
class Row:
    """One measured call."""

    shape: str
    name: str
    wall_us: float
    kernels_us: float | None
    bits: str
    """"equal", "DIFFERENT", or a dash for what is not ours."""


@dataclass
class Timed:
    """A call that is measured in rounds with others."""

    name: str
    call: Call
    bits: str = "-"
    wall_us: float = float("inf")


def quantizing() -> Iterator[tuple[str, dict[str, Any], torch.dtype]]:
    """The calls of the table."""
    bf16 = torch.bfloat16
    yield "NVFP4 plain", {"format": "nvfp4"}, bf16
    yield "NVFP4 4over6", {"format": "nvfp4", "method": hb.FourSix()}, bf16
    yield "NVFP4 optimal", {"format": "nvfp4", "method": "optimal"}, bf16
    yield (
        "NVFP4 optimal, Model-Optimizer's contract",
        {"format": "nvfp4", "contract": "modelopt", "method": "optimal"},
        bf16,
    )
    yield "MXFP4", {"format": "mxfp4"}, bf16
    yield "MXFP4 optimal", {"format": "mxfp4", "method": "optimal"}, bf16
    yield "MXFP8", {"format": "mxfp8"}, bf16
    for dtype, name in ((torch.float16, "fp16"), (torch.float32, "fp32")):
        yield f"NVFP4 plain, {name}", {"format": "nvfp4"}, dtype
        yield f"NVFP4 4over6, {name}", {"format": "nvfp4", "method": hb.FourSix()}, dtype
        yield f"NVFP4 optimal, {name}", {"format": "nvfp4", "method": "optimal"}, dtype


# --- timing ---


def measure_rounds(timed: list[Timed], calls: int) -> None:
    """Best wall time per call, microseconds; all calls take turns."""
    for entry in timed:
        for _ in range(5):
            entry.call()
    for _ in range(ROUNDS):
        for entry in timed:
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(calls):
                entry.call()
            torch.cuda.synchronize()
            entry.wall_us = min(entry.wall_us, (time.perf_counter() - begun) / calls * 1e6)


def kernel_time(call: Call) -> float:
    """Time per call of the kernels alone, microseconds: the median of replays of a graph of several calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(GRAPH_CALLS):
            call()
    times = []
    for _ in range(GRAPH_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000 / GRAPH_CALLS)
    return statistics.median(times)


# --- calls on one tensor ---


def measure_shape(rows: int, width: int) -> list[Row]:
    sources = {
        dtype: torch.randn(rows, width, device="cuda").to(dtype)
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
    }
    x = sources[torch.bfloat16]
    timed = [Timed(TORCH, lambda: (x.abs().amax(), x.clone()))]
    for name, options, dtype in quantizing():
        source = sources[dtype]

        def call(source: torch.Tensor = source, options: dict[str, Any] = options) -> hb.QuantizedTensor:
            return hb.quantize(source, **options)

        q = call()
        timed.append(Timed(name, call, quantized_bits(q, source, options)))
        if dtype == torch.bfloat16 and options.get("method") is None:
            timed.append(Timed(f"{name}, out=", lambda q=q, options=options: hb.quantize(x, **options, out=q)))  # type: ignore[misc]
            timed.append(Timed(f"dequantize {name}", lambda q=q: hb.dequantize(q, torch.bfloat16), decoded_bits(q)))  # type: ignore[misc]
    timed.append(Timed("NVFP4 plain, global_amax=5.0", lambda: hb.quantize(x, "nvfp4", global_amax=5.0)))
    timed += peers(x)
    measure_rounds(timed, 200 if rows <= 64 else 20)
    found = []
    for entry in timed:
        try:
            kernels = kernel_time(entry.call)
        except Exception:  # a peer that waits for the device cannot be captured
            kernels = None
        found.append(Row(f"{rows}x{width}", entry.name, entry.wall_us, kernels, entry.bits))
    return found


def quantized_bits(q: hb.QuantizedTensor, x: torch.Tensor, options: dict[str, Any]) -> str:
    """The first and last rows against the reference, under the tensor scale of the whole tensor."""
    ends = (slice(0, CHECKED_ROWS), slice(x.shape[0] - CHECKED_ROWS, x.shape[0]))
    return "equal" if all(rows_agree(q, x, rows, **options) for rows in ends) else "DIFFERENT"


def decoded_bits(q: hb.QuantizedTensor) -> str:
    codes, scales, stored = (
        None if part is None else torch.as_tensor(part) for part in (q.codes, q.scales, q.stored_scale)
    )
    if codes is None or scales is None:
        raise TypeError("a quantized tensor has codes and scales")
    rows = slice(0, CHECKED_ROWS)
    part = hb.QuantizedTensor(
        q.format, (CHECKED_ROWS, q.shape[1]), codes[rows].cpu(), scales[rows].cpu(), None,
        None if stored is None else stored.cpu(), q.contract, q.method,
    )  # fmt: skip
    mine = torch.as_tensor(hb.dequantize(q, torch.bfloat16))[rows].cpu()
    return (
        "equal" if find_difference(mine, hb.dequantize(part, "bfloat16", backend="reference")) is None else "DIFFERENT"
    )


def peers(x: torch.Tensor) -> list[Timed]:
    """The same work by others, on the same card. What is not installed is said."""
    found = []
    try:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        def eager() -> Any:
            return nvfp4_quantize(x, 16, x.abs().amax().float() / 2688)

        compiled = torch.compile(eager, fullgraph=True)
        compiled()
        found += [Timed("torchao NVFP4, eager", eager), Timed("torchao NVFP4, compiled", compiled)]
    except Exception as error:
        print(f"torchao: not measured ({type(error).__name__}: {str(error)[:100]})")
    try:
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

        found.append(Timed("Model-Optimizer NVFP4", lambda: NVFP4QTensor.quantize(x, 16)))
        found[-1].call()
    except Exception as error:
        print(f"Model-Optimizer: not measured ({type(error).__name__}: {str(error)[:100]})")
    return found


# --- weight sync ---


def measure_sync() -> list[Row]:
    """One layer of a mixture of experts, whose tensors stay on the card."""
    pairs: list[online.Named] = []
    for expert in range(EXPERTS):
        at = f"model.layers.0.mlp.experts.{expert}"
        for name, shape in (
            ("gate_proj", (INNER, HIDDEN)),
            ("up_proj", (INNER, HIDDEN)),
            ("down_proj", (HIDDEN, INNER)),
        ):
            pairs.append((f"{at}.{name}.weight", torch.randn(*shape, device="cuda").to(torch.bfloat16)))
    found = []
    for name, options in (("optimal (default)", Options()), ("amax", Options(method="amax"))):
        config = online.Config(options, "qwen3_moe", 48)

        def call(config: online.Config = config) -> list[online.Named]:
            return online.quantize_named(pairs, Rules(), config)

        got = dict(call())
        expected = dict(online.quantize_named([(n, torch.as_tensor(x).cpu()) for n, x in pairs[:3]], Rules(), config))
        same = all(find_difference(torch.as_tensor(got[n]).cpu(), x) is None for n, x in expected.items())
        timed = [Timed(f"quantize_named, {name}", call, "equal" if same else "DIFFERENT")]
        measure_rounds(timed, 10)
        form = f"{EXPERTS} experts of {HIDDEN}x{INNER}"
        found.append(Row(form, timed[0].name, timed[0].wall_us, kernel_time(call), timed[0].bits))
    return found


# --- cold start ---

START = """
import sys, time
import torch
x = torch.randn(256, 1024, device="cuda").to(torch.bfloat16)
torch.cuda.synchronize()
begun = time.perf_counter()
import halfbyte as hb
hb.dequantize(hb.quantize(x, "nvfp4"), torch.bfloat16)
hb.quantize(x, "nvfp4", method="optimal")
torch.cuda.synchronize()
print(time.perf_counter() - begun)
"""


def measure_start() -> list[tuple[str, float]]:
    """Seconds after importing torch and opening CUDA until three calls are done, in a first and a second process."""
    root = Path(__file__).parents[1]
    found = []
    with tempfile.TemporaryDirectory() as folder:
        caches = {"HALFBYTE_CACHE": f"{folder}/halfbyte", "TRITON_CACHE_DIR": f"{folder}/triton"}
        setting = os.environ | caches | {"PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
        for name in ("first process", "second process"):
            done = subprocess.run(
                [sys.executable, "-c", START], env=setting, capture_output=True, text=True, check=True
            )
            found.append((name, float(done.stdout)))
    return found


# --- output ---


def print_rows(rows: list[Row]) -> None:
    for shape in dict.fromkeys(row.shape for row in rows):
        mine = [row for row in rows if row.shape == shape]
        torch_us = next((row.wall_us for row in mine if row.name == TORCH), None)
        print(f"\n{shape}\n{'call':<46}{'wall, µs':>10}{'× torch':>9}{'kernels, µs':>13}{'× kernels':>11}  bits")
        for row in mine:
            against = "" if torch_us is None else f"{row.wall_us / torch_us:.2f}"
            kernels = "" if row.kernels_us is None else f"{row.kernels_us:.1f}"
            share = "" if row.kernels_us is None else f"{row.wall_us / row.kernels_us:.2f}"
            print(f"{row.name:<46}{row.wall_us:>10.1f}{against:>9}{kernels:>13}{share:>11}  {row.bits}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="calls on one core, by benchmarks/calls_cpu.py")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    chosen = parser.parse_args()
    if chosen.cpu:
        return subprocess.run([sys.executable, "-m", "benchmarks.calls_cpu"], check=False).returncode
    if not torch.cuda.is_available():
        print("no CUDA device: give --cpu for the calls on one core", file=sys.stderr)
        return 1
    versions = {"torch": torch.__version__, "CUDA": torch.version.cuda, "Python": sys.version.split()[0]}
    print(f"{torch.cuda.get_device_name()}; {', '.join(f'{name} {version}' for name, version in versions.items())}; "
          f"halfbyte {hb.__version__}, {os.cpu_count()} cores")  # fmt: skip
    rows: list[Row] = []
    measures: list[Callable[[], list[Row]]] = [functools.partial(measure_shape, *shape) for shape in SHAPES]
    for measure in (*measures, measure_sync):
        found = measure()
        print_rows(found)
        rows += found
    starts = measure_start()
    print("\ncold start, seconds after importing torch and opening CUDA")
    for name, seconds in starts:
        print(f"{name:<46}{seconds:>10.2f}")
    if chosen.json:
        chosen.json.write_text(
            json.dumps({"versions": versions, "rows": [asdict(row) for row in rows], "start": starts})
        )
    return 1 if any(row.bits == "DIFFERENT" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
