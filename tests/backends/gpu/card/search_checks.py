"""The cases of search_cases.py on a card, and the same kernels with memory of all kinds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable

import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte import contracts
from halfbyte.arrays import to_numpy
from halfbyte.layouts.swizzle import swizzle
from halfbyte.study.run import run_study
from halfbyte.testing import assert_same_bits
from tests.backends.cases import weights
from tests.backends.gpu.search_cases import compare_some

WAYS: list[tuple[str, contracts.Contract, hb.methods.Method | None]] = [
    ("nvfp4", contracts.modelopt(mode="fp8_sweep"), None),
    ("nvfp4", contracts.modelopt(mode="four_over_six"), None),
    ("nvfp4", contracts.qwantize(mode="nvfp4/optimal"), None),
    ("mxfp4", contracts.qwantize(mode="mxfp4/optimal"), None),
    ("mxfp4", contracts.ocp(), hb.Optimal()),
    ("mxfp8", contracts.ocp(), hb.Optimal(weights(128))),
    ("nvfp4", contracts.fouroversix(rule="mse", block_2d=True), None),
    ("nvfp4", contracts.transformer_engine(with_rht=True, columnwise=True), None),
]
STACKED = 3
"""The first so many are tried with experts, too."""


def searches() -> int:
    """Every case, spread over processes because kernels have to be compiled."""
    count = max(1, min(16, os.cpu_count() or 1))
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        results = pool.starmap(compare_some, [(first, count) for first in range(count)])
    failures = [failure for _, found in results for failure in found]
    assert not failures, f"{len(failures)} differ, such as\n" + "\n".join(failures[:20])
    return sum(compared for compared, _ in results)


def same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor) -> int:
    assert_same_bits(got.scales, expected.scales)
    assert_same_bits(got.codes, expected.codes)
    return 1


def memory_of_searches() -> int:
    """Strided rows, outputs that are given, captured graphs, swizzled scales, experts."""
    done = 0
    generator = torch.Generator("cuda").manual_seed(3)
    base = torch.randn(70, 256, device="cuda", generator=generator).bfloat16()
    for format, contract, method in WAYS:
        columnwise = contract.transform.columnwise
        rows = base[:64, 32:160] if columnwise else base[3:, 32:160]
        expected = hb.quantize(rows.cpu(), format, contract, method, backend="reference")
        done += same(hb.quantize(rows, format, contract, method, backend="gpu"), expected)
        out = hb.quantize(torch.zeros_like(rows), format, contract, method, backend="gpu")
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = hb.quantize(rows, format, contract, method, backend="gpu", out=out)
        graph.replay()
        torch.cuda.synchronize()
        done += same(captured, expected)
        if contract.name in ("modelopt", "ocp"):
            scales = gpu.quantize_swizzled(rows.contiguous(), contract, method, format)[1]
            assert_same_bits(to_numpy(scales), swizzle(to_numpy(expected.scales)))
            done += 1
    stack = base[:64, :128].reshape(4, 16, 128).contiguous()
    for _, contract, _ in WAYS[:STACKED]:
        for given in (stack, [part.clone() for part in stack]):
            for got, part in zip(gpu.quantize_experts(given, contract), stack, strict=True):
                done += same(got, hb.quantize(part.cpu(), "nvfp4", contract, backend="reference"))
    return done


def study_figures() -> int:
    """The cast study with its tensors on the card: every figure is the CPU's."""
    started = time.perf_counter()
    there = run_study(device="cuda")
    print(f"the study on the card: {time.perf_counter() - started:.1f} s", flush=True)
    assert there == run_study(device="cpu")
    return len(there.rows)


CHECKS: dict[str, Callable[[], int]] = {
    check.__name__: check for check in (searches, memory_of_searches, study_figures)
}
