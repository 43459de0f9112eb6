"""Whole calls on one core: what a user's line costs, from a tiny tensor to a large one, beside torch and the peers.

python -m benchmarks.calls_cpu [--quick] [--compiled] [--json FILE]

All calls get torch bfloat16 tensors, run on one core, and allocate their results. Calls of one kind take turns among
tensors with other amaxes, so that no tables of the call before serve the next. The measure of the table is block
amax, divide and round in eager torch: the least that any quantizer in torch does. What was timed is compared with the
numpy reference (ours) or with ours under the peer's contract (peers).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import halfbyte as hb
from benchmarks.expected import rows_agree
from benchmarks.machine import describe_machine, describe_versions, load_average
from conformance.peers.spec import quiet
from halfbyte.arrays import to_numpy
from halfbyte.contracts import CONTRACTS, NVFP4Rule, get_contract

SIZES = ((16, 16), (16, 6144), (4096, 7168))
MEASURE = "torch: block amax, divide, round"
TURNS = 4
"""Tensors of one size that calls take turns among."""
CHECKED_ROWS = 16
"""Rows of a tensor that are compared with the reference."""


@dataclass(frozen=True)
class Call:
    """A line that a user writes, and the check of its result."""

    name: str
    run: Callable[[int], Any]
    """The call on the tensor of that number."""
    is_right: Callable[[Any], bool] | None = None
    """Whether the result on the first tensor has the right bits; None if it is no result of ours or of a peer."""


@dataclass(frozen=True)
class Row:
    """One measured call."""

    rows: int
    columns: int
    name: str
    best_s: float
    against_torch: float
    bits: str


@contextlib.contextmanager
def one_core() -> Iterator[None]:
    """Run on one core with one thread of torch. halfbyte then takes one thread by itself."""
    threads, cores = torch.get_num_threads(), os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    torch.set_num_threads(1)
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(threads)


def amax_divide_round(x: torch.Tensor) -> torch.Tensor:
    """What every quantizer does at least, as one writes it in torch."""
    blocks = x.view(-1, 16)
    return (blocks / (blocks.abs().amax(dim=-1, keepdim=True) / 6)).round()


# --- the calls ---


def quantizers() -> list[str]:
    """The contracts that quantize NVFP4."""
    format = hb.get_format("nvfp4")
    return [name for name in CONTRACTS if isinstance(get_contract(name, format).rules.get("nvfp4"), NVFP4Rule)]


def our_calls(xs: Sequence[torch.Tensor]) -> list[Call]:
    """quantize by amax, by the exact search and by 4over6, under each contract for a small tensor; dequantize."""
    x = xs[0]
    contracts = quantizers() if x.numel() <= 1 << 16 else ["transformer_engine", "modelopt"]
    calls = [_ours(xs, "nvfp4", contract, method) for contract in contracts for method in ("amax", "optimal")]
    calls.append(_ours(xs, "nvfp4", "transformer_engine", "four_six"))
    if x.shape[1] % 32 == 0:
        calls += [_ours(xs, format, "ocp", method) for format in ("mxfp4", "mxfp8") for method in ("amax", "optimal")]
    return calls + [_our_decode(xs, contract) for contract in contracts]


def _ours(xs: Sequence[torch.Tensor], format: str, contract: str, method: str) -> Call:
    def is_right(got: Any) -> bool:
        return rows_agree(got, xs[0], slice(0, CHECKED_ROWS), format=format, contract=contract, method=method)

    return Call(f"{format} {contract} {method}", lambda turn: hb.quantize(xs[turn], format, contract, method), is_right)


def _our_decode(xs: Sequence[torch.Tensor], contract: str) -> Call:
    tensors = [hb.quantize(x, "nvfp4", contract) for x in xs]
    q = tensors[0]
    few = hb.QuantizedTensor(
        q.format, (CHECKED_ROWS, q.shape[1]), q.codes[:CHECKED_ROWS], q.scales[:CHECKED_ROWS], q.global_scale,
        q.stored_scale, q.contract, q.method,
    )  # fmt: skip
    expected = hb.dequantize(few, torch.bfloat16, backend="reference")
    return Call(
        f"nvfp4 {contract} dequantize",
        lambda turn: hb.dequantize(tensors[turn], torch.bfloat16),
        lambda got: _same(got[:CHECKED_ROWS], expected),
    )


def peer_calls(xs: Sequence[torch.Tensor], compiled: bool) -> list[Call]:
    """The peers that are installed, each with its own amax."""
    calls = []
    for build in (_torchao, _modelopt, _compressed_tensors):
        try:
            with quiet():
                calls += build(xs, compiled)
        except ImportError as error:
            print(f"not here: {error}", file=sys.stderr)
    return calls


def _torchao(xs: Sequence[torch.Tensor], compiled: bool) -> list[Call]:
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def quantize(x: torch.Tensor) -> Any:
        return nvfp4_quantize(x, 16, per_tensor_amax_to_scale(x.abs().max()))

    ours = hb.quantize(xs[0], "nvfp4", "torchao")

    def is_right(got: Any) -> bool:
        return _same(got[1], ours.codes) and _same(got[0], ours.scales)

    calls = [Call("torchao, eager", lambda turn: quantize(xs[turn]), is_right)]
    if compiled:
        faster = torch.compile(quantize, dynamic=False)
        # Inductor fuses and reorders operations, so its bits are not those of the eager call.
        calls.append(Call("torchao, compiled", lambda turn: faster(xs[turn]), None))
    return calls


def _modelopt(xs: Sequence[torch.Tensor], compiled: bool) -> list[Call]:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    ours = hb.quantize(xs[0], "nvfp4", "modelopt")
    quantized = [NVFP4QTensor.quantize(x, 16) for x in xs]
    decoded = hb.dequantize(ours, torch.bfloat16)

    def decode(turn: int) -> Any:
        tensor, scales, factor = quantized[turn]
        return tensor.dequantize(torch.bfloat16, scale=scales, double_scale=factor, block_sizes={-1: 16})

    return [
        Call(
            "Model-Optimizer, quantize",
            lambda turn: NVFP4QTensor.quantize(xs[turn], 16),
            lambda got: _same(got[0]._quantized_data, ours.codes) and _same(got[1], ours.scales),
        ),
        Call(
            "Model-Optimizer, dequantize",
            decode,
            lambda got: _same(got, decoded),
        ),
    ]


def _compressed_tensors(xs: Sequence[torch.Tensor], compiled: bool) -> list[Call]:
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme("NVFP4A16", targets=["Linear"])

    def compress(turn: int) -> Any:
        x = xs[turn]
        groups = x.reshape(len(x), -1, 16)
        factor = generate_gparam(*x.aminmax())
        scale, _ = calculate_qparams(groups.amin(dim=-1), groups.amax(dim=-1), scheme.weights, factor)
        state = {"weight": x, "weight_global_scale": factor, "weight_scale": scale}
        return NVFP4PackedCompressor.compress(state, scheme)

    ours = hb.quantize(xs[0], "nvfp4", "compressed_tensors")

    def is_right(got: Any) -> bool:
        return _same(got["weight_packed"], ours.codes) and _same(got["weight_scale"], ours.scales)

    return [Call("compressed-tensors, compress", compress, is_right)]


def _same(got: Any, wanted: Any) -> bool:
    left, right = (np.ascontiguousarray(to_numpy(part)).view(np.uint8) for part in (got, wanted))
    return bool(np.array_equal(left.reshape(-1), right.reshape(-1)))


# --- the measurement ---


def measure(sizes: Sequence[tuple[int, int]], seconds: float, compiled: bool = False, peers: bool = True) -> list[Row]:
    """Time every call on every size for about `seconds` in all, in turns; the best counts."""
    found = []
    with one_core():
        for rows, columns in sizes:
            xs = _tensors(rows, columns)
            calls = [_measure(xs), *our_calls(xs), *(peer_calls(xs, compiled) if peers else [])]
            bits = [_bits(call) for call in calls]
            best = _best_times(calls, seconds / len(sizes))
            found += [
                Row(rows, columns, call.name, best[index], best[index] / best[0], bits[index])
                for index, call in enumerate(calls)
            ]
    return found


def _tensors(rows: int, columns: int) -> list[torch.Tensor]:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    return [(x * (1 + turn / TURNS)).to(torch.bfloat16) for turn in range(TURNS)]


def _measure(xs: Sequence[torch.Tensor]) -> Call:
    return Call(MEASURE, lambda turn: amax_divide_round(xs[turn]))


def _bits(call: Call) -> str:
    with quiet():
        result = call.run(0)
    return "-" if call.is_right is None else "equal" if call.is_right(result) else "DIFFERENT"


def _best_times(calls: Sequence[Call], seconds: float) -> list[float]:
    """The best time of each call. Short calls are timed in batches of about a millisecond."""
    batches = []
    for call in calls:
        start = time.perf_counter()
        call.run(0)
        batches.append(max(1, min(100, int(1e-3 / (time.perf_counter() - start)))))
    best = [float("inf")] * len(calls)
    end = time.perf_counter() + seconds
    turn = 0
    while turn < 3 or (time.perf_counter() < end and turn < 300):
        for index, (call, batch) in enumerate(zip(calls, batches, strict=True)):
            start = time.perf_counter()
            for number in range(batch):
                call.run((turn + number) % TURNS)
            best[index] = min(best[index], (time.perf_counter() - start) / batch)
        turn += 1
    return best


def table(rows: Sequence[Row]) -> str:
    """The rows as text, one block per size."""
    lines = []
    for size in dict.fromkeys((row.rows, row.columns) for row in rows):
        lines.append(f"\n{size[0]} x {size[1]} bfloat16, one core{'us':>18}{'x torch':>10}  bits")
        for row in rows:
            if (row.rows, row.columns) == size:
                lines.append(f"  {row.name:38}{row.best_s * 1e6:12.1f}{row.against_torch:10.2f}  {row.bits}")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="the two small sizes, a few seconds")
    parser.add_argument("--compiled", action="store_true", help="torchao under torch.compile too (needs g++, a minute)")
    parser.add_argument("--seconds", type=float, default=90.0, help="time for all sizes together")
    parser.add_argument("--json", type=Path, help="write the rows, the machine and the versions to this file")
    options = parser.parse_args(arguments)
    machine, versions, load = describe_machine(), describe_versions(peers=True), load_average()
    print(f"{machine['cpu']}, {machine['cores']} cores, load {load}")
    print(", ".join(f"{name} {version}" for name, version in versions.items() if "flags" not in name))
    sizes, seconds = (SIZES[:2], 6.0) if options.quick else (SIZES, options.seconds)
    rows = measure(sizes, seconds, options.compiled)
    print(table(rows))
    wrong = [row.name for row in rows if row.bits == "DIFFERENT"]
    print("\n" + (f"OTHER BITS: {', '.join(wrong)}" if wrong else "every result of ours and of the peers has its bits"))
    if options.json:
        report = {"machine": machine, "versions": versions, "load": load, "rows": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(report, indent=1))
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
