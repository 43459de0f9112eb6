"""Cases of the kernels that serve one peer, of the MX searches, of descent and of the transform, with their inputs."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import like
from halfbyte.testing import find_difference
from tests.backends.cases import Matrix, make_input, weights
from tests.samples import F32

INPUTS = (
    "gauss", "wide", "wide in range", "block scales", "zeros", "zero blocks", "signed zeros", "outlier", "subnormal",
    "subnormal and normal", "ties", "bits", "finite bits", "bits in a binade", "nonfinite", "infinite", "tiny", "huge",
)  # fmt: skip
DTYPES = ("bf16", "fp16", "fp32")
PARTS = ("scales", "codes", "stored_scale", "global_scale")


@functools.cache
def full_rank(width: int, block: int) -> F32:
    """XᵀX of correlated activations."""
    generator = np.random.default_rng(width + block)
    activations = generator.normal(size=(64, 6)) @ generator.normal(size=(6, width))
    return hb.hessian_from_activations(
        (activations + 0.1 * generator.normal(size=(64, width))).astype(np.float32), block
    )


@functools.cache
def low_rank(width: int, block: int) -> F32:
    """XᵀX of fewer activations than a block has elements: errors can cancel altogether."""
    activations = np.random.default_rng(width - block).normal(size=(3, width))
    return hb.hessian_from_activations(activations.astype(np.float32), block)


@functools.cache
def indefinite(width: int, block: int) -> F32:
    """XᵀX of low rank with eigenvalues a little below zero, as far as rounding may take them: errors below zero."""
    matrices = low_rank(width, block).astype(np.float64)
    largest = np.linalg.eigvalsh(matrices)[:, -1]
    return np.asarray(matrices - 0.9e-3 * largest[:, None, None] * np.eye(block), np.float32)


@dataclass(frozen=True)
class SearchCase:
    """One way to quantize, made for an operand's width."""

    contract: contracts.Contract
    format: str
    block: int
    label: str
    method: Callable[[int], hb.methods.Method | None]
    tile: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.contract!r}-{self.format}-{self.label}-{self.block}"

    def problem(self, x: Matrix, device: str) -> str | None:
        """What differs between the kernels and the reference; None if nothing does."""
        import torch

        source = np.ascontiguousarray(x.T) if self.contract.transform.columnwise else np.array(x)
        method = self.method(x.shape[1])
        got = hb.quantize(
            like(source, torch.empty(0, device=device)), self.format, self.contract, method, self.block, self.tile,
            backend="gpu",
        )  # fmt: skip
        expected = hb.quantize(source, self.format, self.contract, method, self.block, self.tile, backend="reference")
        for part in PARTS:
            mine, wanted = getattr(got, part), getattr(expected, part)
            if (mine is None) != (wanted is None):
                return f"{part} is there on one side only"
            if wanted is not None and (difference := find_difference(mine, wanted, any_nan=True)) is not None:
                return f"{part}: {difference.reason}"
        return None


def own(width: int) -> None:
    """The contract's own method."""


def hessian(h: Callable[[int, int], F32], block: int, codes: str = "nearest") -> Callable[[int], hb.methods.Method]:
    """The method with a matrix made for the width."""
    return lambda width: hb.Hessian(h(width, block), codes="descent" if codes == "descent" else "nearest")


def search_cases() -> list[SearchCase]:
    """Every kernel with every constant that changes its code."""
    cases = [
        SearchCase(contract, "nvfp4", 16, "transform", own)
        for contract in (
            contracts.transformer_engine(columnwise=True, with_rht=True),
            contracts.transformer_engine(columnwise=True, with_rht=True, with_random_sign_mask=False),
            contracts.fouroversix(rht=True, transpose=True),
            contracts.fouroversix(rht=True, rule="mse"),
        )
    ]
    cases.append(SearchCase(contracts.fouroversix(rht=True), "mxfp4", 32, "transform", own))
    for block in (16, 32):
        for mode in ("four_over_six", "fp8_sweep", "fp8_sweep_kernel"):
            cases.append(SearchCase(contracts.modelopt(mode=mode), "nvfp4", block, mode, own))
        for format in ("nvfp4", "mxfp4"):
            searching = contracts.qwantize(mode=f"{format}/optimal")
            through = contracts.qwantize(mode=f"{format}/optimal_hessian")
            cases.append(SearchCase(searching, format, block, "its own", own))
            cases += [
                SearchCase(through, format, block, f"its own through {h.__name__}", hessian(h, block))
                for h in (full_rank, low_rank)
            ]
        cases += [
            SearchCase(
                contracts.transformer_engine(), "nvfp4", block, f"{h.__name__} {codes}", hessian(h, block, codes)
            )
            for h, codes in ((low_rank, "nearest"), (indefinite, "nearest"), (low_rank, "descent"))
        ]
        cases.append(
            SearchCase(contracts.gguf(), "mxfp4", 32, f"descent {block}", hessian(full_rank, 32, "descent"))
            if block == 32
            else SearchCase(contracts.modelopt(), "mxfp4", 16, "descent", hessian(low_rank, 16, "descent"))
        )
    for rule in ("mae", "mse", "abs_max"):
        cases.append(SearchCase(contracts.fouroversix(rule=rule, block_2d=True), "nvfp4", 16, "tiles", own))
    cases.append(SearchCase(contracts.ocp(), "mxfp8", 32, "descent", hessian(full_rank, 32, "descent")))
    cases.append(SearchCase(contracts.ocp(), "mxfp8", 32, "low_rank", hessian(low_rank, 32)))
    cases.append(SearchCase(contracts.ocp(), "mxfp4", 32, "indefinite", hessian(indefinite, 32)))
    cases.append(SearchCase(contracts.ocp(), "mxfp4", 32, "no weight", lambda width: hb.Optimal(0 * weights(width))))
    return cases


def operand(case: SearchCase, name: str, dtype: str) -> Matrix:
    """The input cut to whole blocks; a transposed operand has whole groups of rows.

    A single block where codes descend in MXFP8: its steps are small, and the reference takes them one by one.
    """
    x = make_input(name, dtype)
    rows = x.shape[0] - x.shape[0] % 16 if case.contract.transform.columnwise else x.shape[0]
    if case.format == "mxfp8" and case.label == "descent":
        return np.ascontiguousarray(x[3:4, :32])
    return np.ascontiguousarray(x[:rows, : x.shape[1] - x.shape[1] % 32])


def pairs() -> list[tuple[SearchCase, str]]:
    """Cases and dtypes, shuffled so that the long ones spread. Kernels of 32 through a Hessian compile slowly: one."""
    listed = []
    for index, case in enumerate(search_cases()):
        slow = case.block == 32 and isinstance(case.method(64), hb.Hessian)
        listed += [(case, dtype) for dtype in (DTYPES[index % 3 : index % 3 + 1] if slow else DTYPES)]
    return [listed[i] for i in np.random.default_rng(1).permutation(len(listed))]


def compare_some(first: int, step: int, device: str = "cuda") -> tuple[int, list[str]]:
    """Pairs of case and dtype from `first` on, every `step`th, on six inputs each: how many, and what differed."""
    compared, failures = 0, []
    listed = pairs()
    for index in range(first, len(listed), step):
        case, dtype = listed[index]
        for name in INPUTS[index % 3 :: 3]:
            try:
                problem = case.problem(operand(case, name, dtype), device)
            except Exception:
                problem = traceback.format_exc(limit=-2)
            compared += 1
            if problem:
                failures.append(f"{case} {dtype} {name}: {problem}")
    return compared, failures
