"""The choice of headroom under Triton's interpreter (`TRITON_INTERPRET=1`), against the reference.

A process of its own, like interpreted.py. `--every`: every kind of operand under every contract, not a sample.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte import contracts
from halfbyte.arrays import like, to_numpy
from halfbyte.backends import headroom
from halfbyte.backends.gpu import survey as gpu_survey
from halfbyte.backends.gpu import survey_matrix, total_of
from halfbyte.backends.reference.headroom import survey as reference_survey
from halfbyte.backends.survey import survey_part
from halfbyte.codec.bits import widen
from halfbyte.codec.blocks import split
from halfbyte.layouts.swizzle import swizzle
from halfbyte.methods import Method
from halfbyte.request import resolve
from halfbyte.testing import assert_same_bits
from tests.backends.gpu.headroom_cases import CONTRACTS, KINDS, operand
from tests.backends.gpu.strict_interpreter import set_up

EVERY = "--every" in sys.argv
HERE = torch.empty(0)
TE = contracts.transformer_engine()
ROWS = contracts.transformer_engine(row_scaled_nvfp4=True)
PARTS = ("stored_scale", "global_scale", "scales", "codes")


def same(got: hb.QuantizedTensor, expected: hb.QuantizedTensor) -> int:
    for part in PARTS:
        assert_same_bits(getattr(got, part), getattr(expected, part), any_nan=True)
    return 1


def tensor(x: npt.NDArray[Any]) -> torch.Tensor:
    return torch.as_tensor(like(x, HERE))


def compare(x: npt.NDArray[Any], contract: contracts.Contract, method: Method, **more: Any) -> int:
    got = hb.quantize(like(x, HERE), "nvfp4", contract, method, backend="gpu", **more)
    return same(got, hb.quantize(x, "nvfp4", contract, method, backend="reference", **more))


def squares(width: int) -> npt.NDArray[np.float32]:
    return hb.hessian_from_activations(np.random.default_rng(2).standard_normal((40, width)).astype(np.float32))


def kinds() -> Iterator[int]:
    """Every kind of operand, under the candidates of a small tensor or under 1 and 2, where some blocks decide."""
    for index, contract in enumerate(CONTRACTS):
        for number, kind in enumerate(KINDS):
            if (index + number) % (1 if EVERY else 24) and (EVERY or index > 1 or kind not in ("uniform", "low")):
                continue
            dtype = ("bf16", "fp16", "fp32")[(index + number // 3) % 3]
            chosen = (1, 2) if (index + number // 3) % 4 else None
            yield compare(operand(kind, dtype, 4, 64, seed=index), contract, hb.Optimal(headroom=chosen))


def forms() -> Iterator[int]:
    """Rows, weights, given sets, blocks of 32, padding, strides, outputs, swizzled scales."""
    x = operand("uniform", "bf16", 6, 64)
    weights = np.random.default_rng(1).uniform(0, 2, 64).astype(np.float32)
    for chosen in (None, (1, 2)) if EVERY else ((1, 2),):
        yield compare(x, ROWS, hb.Optimal(headroom=chosen))
        yield compare(operand("nan", "fp32", 4, 64), ROWS, hb.Optimal(headroom=chosen))
        yield compare(x, TE, hb.Optimal(weights, headroom=chosen))
        yield compare(x, TE, hb.Hessian(squares(64), "descent", headroom=chosen))
    for fixed in (2, (1.25, 1.5), 64):
        yield compare(x, TE, hb.Optimal(headroom=fixed))
    yield compare(operand("huge", "fp32", 2, 32), TE, hb.Optimal(headroom=2))  # which float32 cannot hold
    yield compare(operand("low", "fp32", 4, 64), TE, hb.Optimal(headroom=(1, 2)), block=32)
    expected = hb.quantize(x, "nvfp4", TE, hb.Optimal(), backend="reference")
    there = tensor(x)
    apart = torch.zeros(6, 96, dtype=torch.bfloat16)[:, :64].copy_(there)
    yield same(hb.quantize(apart, "nvfp4", TE, hb.Optimal(), backend="gpu"), expected)
    out = hb.quantize(there * 3, "nvfp4", TE, hb.Amax(), backend="gpu")
    yield same(hb.quantize(there, "nvfp4", TE, hb.Optimal(), backend="gpu", out=out), expected)
    assert_same_bits(to_numpy(gpu.quantize_swizzled(there, TE, hb.Optimal())[1]), swizzle(to_numpy(expected.scales)))
    yield 1


def large_tiles() -> Iterator[int]:
    """As large tensors are surveyed: a queue of many blocks for each program, searched 32 at a time."""
    few, gpu_survey.FEW_BLOCKS, gpu_survey.LARGE_TILE = gpu_survey.FEW_BLOCKS, 8, 64
    try:
        for kind, dtype in (("uniform", "bf16"), ("low", "fp32")):
            yield compare(operand(kind, dtype, 20, 192), TE, hb.Optimal(headroom=(1, 2)))
    finally:
        gpu_survey.FEW_BLOCKS, gpu_survey.LARGE_TILE = few, 1024


def batches() -> Iterator[int]:
    """One scale each or one for all, in one tensor or listed; sizes that have other candidates."""
    stack = tensor(operand("uniform", "bf16", 9, 64)).reshape(3, 3, 64)
    stack = (stack * torch.tensor([1.0, 0.5, 3.0]).view(3, 1, 1)).to(torch.bfloat16)
    whole = hb.quantize(to_numpy(stack).reshape(9, 64), "nvfp4", None, hb.Optimal(), backend="reference")
    for given in (stack, [part.clone() for part in stack]) if EVERY else ([part.clone() for part in stack],):
        for got, part in zip(gpu.quantize_experts(given, method=hb.Optimal()), stack, strict=True):
            yield same(got, hb.quantize(to_numpy(part), "nvfp4", None, hb.Optimal(), backend="reference"))
        for at, got in enumerate(gpu.quantize_experts(given, method=hb.Optimal(), shared=True)):
            assert got.stored_scale is not None
            assert whole.stored_scale is not None
            assert_same_bits(to_numpy(got.stored_scale), to_numpy(whole.stored_scale))
            assert_same_bits(to_numpy(got.codes), to_numpy(whole.codes)[3 * at : 3 * at + 3])
            yield 1
    limit, headroom.SMALL = headroom.SMALL, 256
    try:
        mixed = [tensor(operand("uniform", "bf16", rows, 64, seed=rows)) for rows in (2, 8, 3)]
        for got, x in zip(gpu.quantize_experts(mixed, method=hb.Optimal()), mixed, strict=True):
            yield same(got, hb.quantize(to_numpy(x), "nvfp4", None, hb.Optimal(), backend="reference"))
    finally:
        headroom.SMALL = limit


def pieces() -> Iterator[int]:
    """Totals of parts of a tensor under its amax, as a conversion adds them: differences are the reference's."""
    for kind, dtype, chosen in (("uniform", "bf16", (1, 2)), ("low", "fp16", (1, 2)), ("gauss", "fp32", None)):
        x, method = operand(kind, dtype, 6, 64), hb.Optimal(headroom=chosen)
        request = resolve("nvfp4", TE, method, dtype=dtype)
        candidates, amax = headroom.headrooms(request, x.size), np.abs(widen(x)).max()
        wanted = reference_survey(split(widen(x), 16), amax, request, candidates)
        found = [0] * len(candidates)
        for piece in (x[:1], x[1:]):
            totals = survey_matrix(tensor(piece), request, float(amax), headroom.Trial(candidates))
            found = [sum + total_of(words) for sum, words in zip(found, totals.tolist(), strict=True)]
        assert [total - found[0] for total in found] == [int(total or 0) - int(wanted[0] or 0) for total in wanted]
        yield 1


def probed() -> Iterator[int]:
    """Operands beyond the small ones: a sample speaks for the headroom of 4over6, or does not; whole, and in parts."""
    limits, headroom.SMALL, headroom.SAMPLED = (headroom.SMALL, headroom.SAMPLED), 256, 150
    try:
        x = operand("gauss", "fp32", 8, 64)
        x = np.asarray(hb.dequantize(hb.quantize(x, "nvfp4", TE, hb.FourSix("mse", 256)))).astype(x.dtype)
        yield compare(x, TE, hb.Optimal())
        yield compare(operand("uniform", "bf16", 8, 64), TE, hb.Optimal())
        if EVERY:
            yield compare(x, ROWS, hb.Optimal())
            yield compare(x, TE, hb.Optimal(np.random.default_rng(1).uniform(0, 2, 64).astype(np.float32)))
        request, amax = resolve("nvfp4", TE, "optimal", dtype="fp32"), np.abs(x).max()
        trial = headroom.Trial((1.0, 1.75, 2.0), 3)
        words = survey_matrix(tensor(x[2:5]), request, float(amax), trial, 2).tolist()
        assert tuple(map(total_of, words)) == survey_part(x[2:5], request, amax, trial, 2)
        yield 1
    finally:
        headroom.SMALL, headroom.SAMPLED = limits


def comparisons() -> Iterator[int]:
    yield from probed()
    yield from kinds()
    yield from forms()
    yield from large_tiles()
    yield from batches()
    yield from pieces()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_up()
    print(sum(comparisons()), "comparisons")
    sys.exit(0)
