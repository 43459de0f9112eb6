"""The searches and the transform under Triton's interpreter (`TRITON_INTERPRET=1`), against the reference.

A process of its own, like interpreted.py. Operations of the interpreter cost the same for one block as for many, so a
kernel meets one small operand that holds what its branches look for. `--every`: every operand of tiny numbers,
whole, not a few rows and columns of one.
"""

from __future__ import annotations

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import like, to_numpy
from halfbyte.testing import assert_same_bits
from tests.backends.cases import Matrix, make_input, weights
from tests.backends.gpu.search_cases import SearchCase, full_rank, hessian, low_rank, own
from tests.backends.gpu.strict_interpreter import set_up

HERE = torch.empty(0)
EVERY = "--every" in sys.argv


def mixed(dtype: str, columns: int = 64) -> Matrix:
    """A row each of numbers, ties, zeros among numbers, many binades, and what is not finite."""
    names = ("gauss", "ties", "signed zeros", "block scales", "subnormal", "nonfinite")
    return np.concatenate([make_input(name, dtype)[3:4, :columns] for name in names])


def compare(
    contract: contracts.Contract,
    format: str,
    x: Matrix,
    method: Callable[[int], hb.methods.Method | None] = own,
    block: int | None = None,
) -> int:
    case = SearchCase(contract, format, block or hb.get_format(format).block, "interpreted", method)
    problem = case.problem(x, "cpu")
    assert problem is None, f"{case}: {problem}"
    return 1


def comparisons() -> Iterator[int]:
    te = contracts.transformer_engine(columnwise=True, with_rht=True)
    for dtype in ("bf16", "fp16", "fp32"):
        yield compare(te, "nvfp4", np.ascontiguousarray(make_input("nonfinite", dtype)[:16, :32]))
        yield compare(contracts.fouroversix(rht=True), "nvfp4", mixed(dtype))
    for dtype in ("bf16", "fp32"):
        yield compare(contracts.modelopt(mode="four_over_six"), "nvfp4", mixed(dtype)[:5])
        yield compare(contracts.modelopt(mode="four_over_six"), "nvfp4", mixed(dtype))
    yield compare(contracts.modelopt(mode="fp8_sweep"), "nvfp4", mixed("bf16")[:5])
    yield compare(contracts.modelopt(mode="fp8_sweep_kernel"), "nvfp4", mixed("fp32")[:5])
    tiles = np.ascontiguousarray(make_input("block scales", "fp32")[:17, :48])
    yield compare(contracts.fouroversix(rule="mse", block_2d=True), "nvfp4", tiles)
    yield compare(contracts.fouroversix(rule="abs_max", block_2d=True), "nvfp4", tiles)
    yield compare(contracts.qwantize(mode="nvfp4/optimal"), "nvfp4", mixed("bf16", 32))
    yield compare(contracts.qwantize(mode="mxfp4/optimal"), "mxfp4", mixed("fp32", 32))
    through = contracts.qwantize(mode="nvfp4/optimal_hessian")
    yield compare(through, "nvfp4", mixed("fp32", 16), hessian(low_rank, 16))
    yield from exact_searches()
    yield cast_through_bfloat16()
    yield from casts_that_keep()


def exact_searches() -> Iterator[int]:
    """Power-of-two scales, and codes that descend."""
    for contract, format, dtype in (
        (contracts.ocp(), "mxfp4", "fp32"),
        (contracts.gguf(), "mxfp4", "bf16"),
        (contracts.compressed_tensors(), "mxfp4", "fp16"),
        (contracts.qwantize(), "mxfp4", "bf16"),
        (contracts.torchao(mode="mx", scaling_mode="rceil"), "mxfp8", "bf16"),
    ):
        yield compare(contract, format, mixed(dtype, 32), lambda width: hb.Optimal())
    yield compare(contracts.modelopt(), "mxfp4", mixed("fp32", 32), lambda width: hb.Optimal(weights(width)), 16)
    te = contracts.transformer_engine()  # whose factor is clamped for numbers as small as these
    tiny = (("subnormal", "bf16", 16), ("tiny", "fp32", 16), ("subnormal", "bf16", 32))
    for name, dtype, block in tiny if EVERY else tiny[:1]:
        x = make_input(name, dtype)
        x = x if EVERY else np.ascontiguousarray(x[:6, :64])
        yield compare(te, "nvfp4", x, lambda width: hb.Optimal(), block)
    side_by_side = [hb.Optimal(weights(32)), hb.Optimal(weights(33)[:32])]  # each keeps its own numbers on the device
    for index in range(2):
        yield compare(contracts.ocp(), "mxfp4", mixed("fp32", 32)[:2], kept(side_by_side, index))
    yield compare(contracts.ocp(), "mxfp4", mixed("bf16", 16), hessian(full_rank, 16), 16)
    yield compare(contracts.transformer_engine(), "nvfp4", mixed("bf16", 16)[:2], hessian(full_rank, 16, "descent"))


def kept(methods: list[hb.Optimal], index: int) -> Callable[[int], hb.Optimal]:
    return lambda width: methods[index]


def on_device(x: hb.QuantizedTensor) -> hb.QuantizedTensor:
    codes, scales = like(to_numpy(x.codes), HERE), like(to_numpy(x.scales), HERE)
    return dataclasses.replace(x, codes=codes, scales=scales)


def cast_through_bfloat16() -> int:
    """Model-Optimizer's cast, on the device that the backend computes on."""
    x = hb.quantize(make_input("gauss", "fp32")[:3, :64], "mxfp4", "modelopt")
    contract = contracts.modelopt(mode="quantize_mxfp4_to_nvfp4")
    got, _ = hb.cast(on_device(x), "nvfp4", contract=contract, backend="gpu")
    expected, _ = hb.cast(x, "nvfp4", contract=contract, backend="reference")
    assert_same_bits(got.codes, expected.codes)
    assert_same_bits(got.scales, expected.scales)
    return 1


def casts_that_keep() -> Iterator[int]:
    """Every algorithm on tensors that fit a window, that do not, and that are zero: bytes and reports of the host."""
    stack = make_input("gauss", "fp32")[:16, :64].reshape(2, 8, 64)
    inputs = [stack, make_input("zero blocks", "fp32"), make_input("zeros", "fp32"), make_input("wide", "bf16")]
    for x in inputs:
        source = hb.quantize(x, "mxfp4", "ocp")
        for algorithm in ("optimal", "hybrid", "verbatim"):
            got, report = hb.cast(on_device(source), "nvfp4", algorithm, backend="gpu")
            expected, wanted = hb.cast(source, "nvfp4", algorithm, backend="reference")
            assert report == wanted, f"{report}\n{wanted}"
            for part in ("codes", "scales", "global_scale", "stored_scale"):
                assert_same_bits(getattr(got, part), getattr(expected, part))
            yield 1


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_up()
    print(sum(comparisons()), "comparisons")
    sys.exit(0)
