"""The speed of the GPU kernels, compared with a copy and with the peers. Checks the bits of the results it timed.

    python -m benchmarks.gpu                      both shapes and the experts
    python -m benchmarks.gpu --shapes "" --contracts       SSE-optimal, 4over6 and MX under every contract and dtype
    python -m benchmarks.gpu --peers DIR          also the peers whose packages are in DIR

Times are medians over replays of a CUDA graph with ten launches. There are two times: that of the kernel alone, and
that of a whole call, which also prepares the tensor-level numbers (and for experts finds the amaxes). If CUDA C++
kernels serve the call, their time includes both launches, and the time of Triton's kernel is shown as well. No tensor
fits into the cache. The floor is the bytes that must be read and written, divided by the bandwidth of the best
device-to-device copy in the same run. Exit status 1: some result differs from that of the reference.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte.arrays import to_numpy
from halfbyte.backends import Request
from halfbyte.backends.gpu.batch import group_amaxes
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.dispatch import TENSOR, block_commands, prepare_command
from halfbyte.backends.gpu.driver.commands import Program, Slot
from halfbyte.backends.gpu.driver.run import run
from halfbyte.backends.gpu.launch import Launch, Matrix, source_of
from halfbyte.backends.gpu.operand import row_quads
from halfbyte.backends.gpu.small import Small
from halfbyte.testing import find_difference

Call = Callable[[], object]

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
SHAPES = ((16384, 6144), (98304, 7168))
EXPERTS = (128, 2048, 2048)


@dataclass(frozen=True)
class Row:
    """One measurement."""

    shape: str
    kernel: str
    micros: float
    call: float
    floor: float
    bits: str
    triton: float | None = None
    """The time of Triton's kernel, if a CUDA C++ kernel served the call."""

    @property
    def times(self) -> float:
        return self.micros / self.floor


def graph_time(call: Callable[[], object], calls: int = 10, rounds: int = 9) -> float:
    """Median microseconds of a call. A CUDA graph holds several calls."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1000 / calls)
    return statistics.median(times)


def copy_bandwidth() -> float:
    """Bytes that the best copy reads and writes per microsecond."""
    best = 0.0
    for count in (1 << 27, 1 << 28):
        source = torch.randn(count, device="cuda")
        target = torch.empty_like(source)
        best = max(best, 2 * source.nbytes / graph_time(functools.partial(torch.mul, source, 1.0, out=target), 5))
    return best


def equal(
    got: hb.QuantizedTensor,
    x: torch.Tensor,
    method: hb.methods.Method,
    format: str,
    amax: float | None,
    contract: hb.contracts.Contract | None = None,
) -> bool:
    """Whether a few rows equal those of the reference."""
    rows = slice(x.shape[0] // 2, x.shape[0] // 2 + 4)
    expected = hb.quantize(x[rows].cpu(), format, contract, method, global_amax=amax, backend="reference")
    for part in ("codes", "scales"):
        if find_difference(to_numpy(getattr(got, part))[rows], to_numpy(getattr(expected, part))) is not None:
            return False
    return True


METHODS: dict[str, hb.methods.Method] = {
    "plain NVFP4": hb.Amax(),
    "4over6 fast MAE": hb.FourSix("mae", 448, True),
    "4over6 fast MSE": hb.FourSix("mse", 448, True),
    "4over6 strict MAE": hb.FourSix("mae", 448),
    "4over6 strict MSE": hb.FourSix("mse", 448),
    "SSE-optimal": hb.Optimal(),
}


def block_kernel(x: torch.Tensor, method: hb.methods.Method, amax: torch.Tensor, q: hb.QuantizedTensor) -> Call:
    """The quantizing kernel alone, with tensor-level numbers that were prepared before."""
    request = Request(q.format, q.contract, method, (1, 16), "tensor", NAMES[x.dtype], device="cuda")
    kernel = choose(request)
    if not (
        isinstance(kernel, ChosenKernel) and isinstance(q.codes, torch.Tensor) and isinstance(q.scales, torch.Tensor)
    ):
        raise TypeError("this measures NVFP4 on a card")
    small, held = Small(1), torch.empty(Small(1).floats, device="cuda")
    run(Program((prepare_command(kernel, small, TENSOR),)), x.device, {Slot.SMALL: held, Slot.GIVEN: amax})
    source = source_of(Matrix(x.shape[0], x.shape[1], row_quads(x), x.is_contiguous()), request, x.shape[0], False)
    slots: dict[Slot, torch.Tensor | int] = {Slot.X: x, Slot.CODES: q.codes, Slot.SCALES: q.scales, Slot.SMALL: held}

    def call() -> None:
        commands, table_bytes = block_commands(Launch(kernel, request, source, x.device))
        tables = torch.empty(table_bytes, dtype=torch.uint8, device=x.device)
        run(Program(tuple(commands)), x.device, slots | {Slot.TABLES: tables})

    return call


T = TypeVar("T")


def without_tables(call: Callable[[], T]) -> T:
    """The result of a call that uses only Triton's kernels."""
    before = os.environ.get("HALFBYTE_CUDA", "1")
    os.environ["HALFBYTE_CUDA"] = "0"
    try:
        return call()
    finally:
        os.environ["HALFBYTE_CUDA"] = before


def measure_shape(rows: int, width: int, bandwidth: float) -> list[Row]:
    x = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
    for start in range(0, rows, 16384):
        x[start : start + 16384].normal_()
    shape, found = f"{rows}x{width}", []
    read, out = x.nbytes, x.numel() // 2 + x.numel() // 16

    def add(
        name: str, call: Call, moved: int, same: bool, alone: Call | None = None, triton: float | None = None
    ) -> None:
        time = graph_time(call)
        kernel = time if alone is None else graph_time(alone)
        found.append(Row(shape, name, kernel, time, moved / bandwidth, "equal" if same else "DIFFERENT", triton))

    amax = group_amaxes(x, rows)
    add("amax", functools.partial(group_amaxes, x, rows), read, float(amax) == float(x.abs().max()))
    for name, method in METHODS.items():
        q = hb.quantize(x, "nvfp4", method=method, global_amax=amax)
        call = functools.partial(hb.quantize, x, "nvfp4", method=method, global_amax=amax, out=q)
        same = equal(q, x, method, "nvfp4", float(amax))
        alone, triton = block_kernel(x, method, amax, q), None
        if not isinstance(method, hb.Amax):
            triton = without_tables(functools.partial(graph_time, alone))
            beside = without_tables(functools.partial(hb.quantize, x, "nvfp4", method=method, global_amax=amax))
            same = same and all(torch.equal(getattr(q, part), getattr(beside, part)) for part in ("codes", "scales"))
        add(name, call, read + out, same, alone, triton)
    q = hb.quantize(x, "nvfp4", global_amax=amax)
    values = torch.empty_like(x)
    hb.dequantize(q, "bf16", out=values)
    row = hb.quantize(x[:2].cpu(), "nvfp4", global_amax=float(amax))
    same = find_difference(values[:2].cpu(), hb.dequantize(row, "bf16", backend="reference")) is None
    add("dequantize", functools.partial(hb.dequantize, q, "bf16", out=values), read + out, same)
    for name in ("mxfp4", "mxfp8"):
        m = hb.quantize(x, name)
        size = x.numel() // (2 if name == "mxfp4" else 1) + x.numel() // 32
        same = equal(m, x, hb.Amax(), name, None)
        add(name.upper(), functools.partial(hb.quantize, x, name, out=m), read + size, same)
    m = hb.quantize(x, "mxfp4")
    if not (isinstance(m.codes, torch.Tensor) and isinstance(m.scales, torch.Tensor)):
        raise TypeError("tensors on a card give tensors")
    same = find_difference(gpu.cast_scales(m.codes, m.scales, 127)[0], m.codes) is None
    moved = x.numel() + x.numel() // 32 + x.numel() // 16
    add("MXFP4 to NVFP4", functools.partial(gpu.cast_scales, m.codes, m.scales, 127), moved, same)
    return found


def measure_experts(bandwidth: float) -> list[Row]:
    x = torch.randn(*EXPERTS, device="cuda").to(torch.bfloat16)
    shape, moved = "x".join(map(str, EXPERTS)), 2 * x.nbytes + x.numel() // 2 + x.numel() // 16
    found = []
    given: list[tuple[str, torch.Tensor | list[torch.Tensor]]] = [("3-D", x), ("a list", [part.clone() for part in x])]
    methods = {"plain": hb.Amax(), "4over6 strict": hb.FourSix("mae", 448), "SSE-optimal": hb.Optimal()}
    for (name, weights), (label, method) in itertools.product(given, methods.items()):
        call = functools.partial(gpu.quantize_experts, weights, method=method)
        parts = call()
        alone = hb.quantize(x[77, :64].cpu(), "nvfp4", method=method, global_amax=float(x[77].abs().max()))
        same = find_difference(to_numpy(parts[77].codes)[:64], to_numpy(alone.codes)) is None
        time = graph_time(call)
        triton = None if label == "plain" else without_tables(functools.partial(graph_time, call))
        bits = "equal" if same else "DIFFERENT"
        found.append(Row(shape, f"amax, {label}; {name}", time, time, moved / bandwidth, bits, triton))
    return found


def measure_peers(rows: int, width: int, ours: dict[str, float]) -> list[dict[str, Any]]:
    """Time the peers on the same data. Prints which peers cannot be imported."""
    x = torch.randn(rows, width, device="cuda").to(torch.bfloat16)
    found: list[dict[str, Any]] = []

    def add(name: str, make: Callable[[], Callable[[], object]], mine: str, share: float = 1.0) -> None:
        try:
            call = make()
            for _ in range(3):
                call()
            times = []
            for _ in range(5):
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                call()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) * 1000)
            micros = statistics.median(times) / share
            found.append({"peer": name, "micros": micros, "against": mine, "times": micros / ours[mine]})
        except Exception as error:
            found.append({"peer": name, "error": f"{type(error).__name__}: {str(error)[:200]}"})

    def torchao() -> Callable[[], object]:
        from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

        scale = (x.abs().max() / 2688).float()
        compiled = torch.compile(nvfp4_quantize, fullgraph=True)
        return lambda: compiled(x, 16, scale)

    def sweep() -> Callable[[], object]:
        from modelopt.torch.kernels.quantization.gemm.nvfp4_fp8_sweep import nvfp4_fp8_scale_sweep

        amax = x.abs().max().float()
        return lambda: nvfp4_fp8_scale_sweep(x, amax)

    def qwantize(name: str) -> Callable[[], Callable[[], object]]:
        def make() -> Callable[[], object]:
            import qwantize

            part = x[: rows // 16].float().reshape(rows // 16, -1, 16)
            return lambda: getattr(qwantize, name)(part)

        return make

    add("torchao nvfp4_quantize, compiled", torchao, "plain NVFP4")
    add("Model-Optimizer's 126-scale sweep (scales only)", sweep, "SSE-optimal")
    add("qwantize naive (a sixteenth of the rows, times 16)", qwantize("nvfp4_naive"), "plain NVFP4", 1 / 16)
    add("qwantize optimal (a sixteenth of the rows, times 16)", qwantize("nvfp4_optimal"), "SSE-optimal", 1 / 16)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="a folder that holds the peers' packages")
    parser.add_argument("--shapes", default=",".join(f"{rows}x{width}" for rows, width in SHAPES))
    parser.add_argument("--contracts", action="store_true", help="every contract and dtype instead of the experts")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    print(f"{name}, torch {torch.__version__}: copy {bandwidth / 1e6:.2f} TB/s")
    rows: list[Row] = []
    for shape in filter(None, chosen.shapes.split(",")):
        height, width = map(int, shape.split("x"))
        rows += measure_shape(height, width, bandwidth)
        torch.cuda.empty_cache()
    if chosen.contracts:
        from benchmarks.gpu_contracts import measure_contracts

        rows += measure_contracts(*SHAPES[0], bandwidth)
    else:
        rows += measure_experts(bandwidth)
    print(f"{'shape':>15} {'kernel':<36} {'µs':>9} {'× floor':>8} {'call µs':>9} {'Triton µs':>10}  bits")
    for row in rows:
        beside = "" if row.triton is None else f"{row.triton:.1f}"
        figures = f"{row.micros:9.1f} {row.times:8.2f} {row.call:9.1f} {beside:>10}"
        print(f"{row.shape:>15} {row.kernel:<36} {figures}  {row.bits}", flush=True)
    peers: list[dict[str, Any]] = []
    if chosen.peers is not None:
        sys.path.insert(0, str(chosen.peers))
        first = rows[0].shape
        peers = measure_peers(*SHAPES[0], {row.kernel: row.micros for row in rows if row.shape == first})
        for peer in peers:
            print(
                peer.get("error") or f"{peer['times']:8.1f}× {peer['against']}",
                peer["peer"],
                f"{peer.get('micros', 0):.0f} µs",
            )
    if chosen.json is not None:
        listed = [asdict(row) | {"times": row.times} for row in rows]
        chosen.json.write_text(
            json.dumps({"card": name, "bandwidth": bandwidth, "rows": listed, "peers": peers}, indent=1)
        )
    return 0 if all(row.bits == "equal" for row in rows) else 1


if __name__ == "__main__":
    np.seterr(all="ignore")
    sys.exit(main())
