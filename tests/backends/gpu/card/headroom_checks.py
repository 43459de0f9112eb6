"""The choice of headroom on a card: bits against the reference, graphs, streams, batches; and what it costs.

python3 -m tests.backends.gpu.card.headroom_checks
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte import contracts
from halfbyte.arrays import like, to_numpy
from halfbyte.layouts.swizzle import swizzle
from halfbyte.testing import assert_same_bits, find_difference
from tests.backends.gpu.card.call_checks import never_waiting
from tests.backends.gpu.card.checks import normal, same
from tests.backends.gpu.card.cuda_checks import kernels
from tests.backends.gpu.headroom_cases import CONTRACTS, KINDS, operand

CARD = "cuda"
EVERY_BLOCK = (1.0, 2.0, 64.0)
"""Candidates under which all blocks are searched; 64 never wins."""


def uniform(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CARD).manual_seed(seed)
    return (torch.rand(*shape, generator=generator, device=CARD) * 2 - 1).to(dtype)


def compare(x: object, contract: contracts.Contract, method: hb.Optimal) -> None:
    """Any NaN counts as equal, as in the matrix."""
    got = hb.quantize(like(np.asarray(x), torch.empty(0, device=CARD)), "nvfp4", contract, method, backend="gpu")
    expected = hb.quantize(np.asarray(x), "nvfp4", contract, method, backend="reference")
    for part in ("stored_scale", "global_scale", "scales", "codes"):
        found = find_difference(getattr(got, part), getattr(expected, part), any_nan=True)
        assert found is None, f"{part}: {found.reason}"


def small_operands() -> int:
    """Every kind of operand: under the candidates of a small tensor, and under 1 and 2, where some blocks decide."""
    done, failures = 0, []
    for index, contract in enumerate(CONTRACTS):
        for number, kind in enumerate(KINDS):
            dtype = ("bf16", "fp16", "fp32")[(index + number) % 3]
            x = operand(kind, dtype, 12, 128, seed=number)
            for headroom in (None, (1, 2)):
                try:
                    compare(x, contract, hb.Optimal(headroom=headroom))
                except AssertionError as error:
                    failures.append(f"{contract.name} {kind} {dtype} {headroom}: {error}")
                done += 1
    assert not failures, "\n".join(failures)
    return done


def other_forms() -> int:
    """Rows, weights, given sets, padding, strides, outputs, tiles of scales."""
    te = contracts.transformer_engine()
    x = operand("uniform", "bf16", 24, 256)
    weights = np.random.default_rng(1).uniform(0, 2, 256).astype(np.float32)
    compare(x, contracts.transformer_engine(row_scaled_nvfp4=True), hb.Optimal())
    compare(x, contracts.transformer_engine(row_scaled_nvfp4=True), hb.Optimal(headroom=(1, 2)))
    for headroom in (None, (1, 2), 1, 2, (1.25, 1.5), 64):
        compare(x, te, hb.Optimal(headroom=headroom))
        compare(x, te, hb.Optimal(weights, headroom=headroom))
    big = operand("huge", "fp32", 4, 64)
    compare(big, te, hb.Optimal(headroom=2))
    on_card = torch.as_tensor(like(np.asarray(x), torch.empty(0, device=CARD)))
    expected = hb.quantize(np.asarray(x), "nvfp4", te, hb.Optimal(), backend="reference")
    wide = torch.zeros(24, 512, dtype=torch.bfloat16, device=CARD)[:, :256].copy_(on_card)
    out = hb.quantize(on_card * 3, "nvfp4", te, hb.Optimal())
    for got in (hb.quantize(wide, "nvfp4", te, hb.Optimal()), hb.quantize(on_card, "nvfp4", te, hb.Optimal(), out=out)):
        same(got, expected)
    codes, scales, stored = gpu.quantize_swizzled(on_card, te, hb.Optimal())
    assert_same_bits(to_numpy(codes), to_numpy(expected.codes))
    assert_same_bits(to_numpy(scales), swizzle(to_numpy(expected.scales)))
    assert stored is not None
    assert expected.stored_scale is not None
    assert_same_bits(to_numpy(stored).reshape(()), to_numpy(expected.stored_scale))
    return 18


def larger_operands() -> int:
    """16 x 6144 against the reference; larger ones against a search of all blocks."""
    done = 0
    for kind, name in (("gauss", "bf16"), ("uniform", "fp16"), ("low", "fp32")):
        compare(operand(kind, name, 16, 6144), contracts.transformer_engine(), hb.Optimal())
        done += 1
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for x in (normal(512, 6144, dtype=dtype), uniform(2048, 6144, dtype=dtype), normal(4096, 6144, dtype=dtype)):
            for contract in ("transformer_engine", "modelopt"):
                for tables in (False, True):
                    with kernels(tables):
                        got = hb.quantize(x, "nvfp4", contract, hb.Optimal(), backend="gpu")
                        wanted = hb.quantize(x, "nvfp4", contract, hb.Optimal(headroom=EVERY_BLOCK), backend="gpu")
                    done += same(got, wanted)
    x = uniform(2048, 2048) * torch.exp2(-torch.randint(8, 14, (2048, 128), device=CARD)).repeat_interleave(16, 1)
    x[0, 0] = 1.0
    got = hb.quantize(x.bfloat16(), "nvfp4", None, hb.Optimal())
    return done + same(got, hb.quantize(x.bfloat16(), "nvfp4", None, hb.Optimal(headroom=EVERY_BLOCK)))


def written_by_four_six() -> int:
    """Weights beyond the small ones that 4over6 with 256 wrote, for which a sample speaks; beside the CPU."""
    done = 0
    for shape in ((256, 512), (2048, 2064)):
        for number, contract in enumerate((contracts.transformer_engine(), contracts.modelopt(), contracts.miles())):
            x = normal(*shape, seed=number)
            wrote = hb.dequantize(hb.quantize(x, "nvfp4", contract, hb.FourSix("mse", 256)))
            for dtype in (torch.bfloat16, torch.float32):
                given = torch.as_tensor(wrote).to(dtype)
                got = hb.quantize(given, "nvfp4", contract, hb.Optimal(), backend="gpu")
                done += same(got, hb.quantize(given.cpu(), "nvfp4", contract, hb.Optimal(), backend="cpu"))
                done += same(got, hb.quantize(given, "nvfp4", contract, hb.Optimal(headroom=1.75), backend="gpu"))
    by_row = contracts.transformer_engine(row_scaled_nvfp4=True)
    wrote = hb.dequantize(hb.quantize(normal(512, 512), "nvfp4", by_row, hb.FourSix("mse", 256)))
    for x in (torch.as_tensor(wrote).bfloat16(), normal(512, 512), uniform(300, 1024)):
        got = hb.quantize(x, "nvfp4", by_row, hb.Optimal(), backend="gpu")
        done += same(got, hb.quantize(x.cpu(), "nvfp4", by_row, hb.Optimal(), backend="cpu"))
    both = [torch.as_tensor(wrote).bfloat16(), normal(512, 512), normal(16, 64), torch.as_tensor(wrote).bfloat16() * 3]
    for got, x in zip(gpu.quantize_experts(both, method=hb.Optimal()), both, strict=True):
        done += same(got, hb.quantize(x.cpu(), "nvfp4", None, hb.Optimal(), backend="cpu"))
    return done


def batches() -> int:
    """Experts in one tensor or listed, sharing a scale or not; small and large ones in one list."""
    done = 0
    stack = uniform(5 * 32, 256).view(5, 32, 256) * torch.tensor([1.0, 0.5, 2.0, 1.5, 3.0], device=CARD).view(5, 1, 1)
    stack = stack.bfloat16().contiguous()
    whole = hb.quantize(stack.cpu().view(-1, 256), "nvfp4", None, hb.Optimal(), backend="reference")
    for given in (stack, [part.clone() for part in stack]):
        for at, got in enumerate(gpu.quantize_experts(given, method=hb.Optimal())):
            expected = hb.quantize(stack[at].cpu(), "nvfp4", None, hb.Optimal(), backend="reference")
            done += same(got, expected)
        for at, got in enumerate(gpu.quantize_experts(given, method=hb.Optimal(), shared=True)):
            assert got.stored_scale is not None
            assert whole.stored_scale is not None
            assert_same_bits(to_numpy(got.stored_scale), to_numpy(whole.stored_scale))
            assert_same_bits(to_numpy(got.codes), to_numpy(whole.codes)[32 * at : 32 * at + 32])
            done += 1
    mixed = [uniform(16, 256), normal(512, 512), uniform(4, 64), uniform(300, 1024)]
    for got, x in zip(gpu.quantize_experts(mixed, method=hb.Optimal()), mixed, strict=True):
        done += same(got, hb.quantize(x, "nvfp4", None, hb.Optimal()))
    return done


def graphs_and_streams() -> int:
    """Captured and replayed on new data, beside eager calls; several streams at once; nothing waits."""
    done = 0
    for rows in (8, 64, 2048):
        x = uniform(rows, 1024)
        hb.quantize(x, "nvfp4", None, "optimal")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            q = hb.quantize(x, "nvfp4", None, "optimal")
        for seed in range(4):
            new = (uniform if seed % 2 else normal)(rows, 1024, seed=seed) * (seed + 1)
            x.copy_(new)
            graph.replay()
            beside = hb.quantize(new * 5, "nvfp4", None, "optimal")
            torch.cuda.synchronize()
            done += same(q, hb.quantize(new, "nvfp4", None, "optimal"))
            done += same(beside, hb.quantize(new * 5, "nvfp4", None, "optimal"))
    inputs = [uniform(1024, 2048, seed=seed) if seed % 2 else normal(1024, 2048, seed=seed) for seed in range(6)]
    expected = [hb.quantize(x, "nvfp4", None, hb.Optimal()) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    found = []
    with never_waiting():
        for _ in range(8):
            for at, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    found.append((at, hb.quantize(inputs[at], "nvfp4", None, hb.Optimal())))
    torch.cuda.synchronize()
    return done + sum(same(got, expected[at]) for at, got in found)


CHECKS: dict[str, Callable[[], int]] = {
    "headroom of small operands": small_operands,
    "headroom in other forms": other_forms,
    "headroom of larger operands": larger_operands,
    "headroom of what 4over6 wrote": written_by_four_six,
    "headroom of batches": batches,
    "headroom in graphs and streams": graphs_and_streams,
}


def times() -> None:
    """Wall time of whole calls and time of their kernels, with headroom 1, by default, and torch's amax and clone."""
    from benchmarks.calls import Timed, kernel_time, measure_rounds

    for shape in ((16, 6144), (16384, 6144)):
        x = normal(*shape)
        flat = uniform(*shape)

        def torch_floor(x: torch.Tensor = x) -> None:
            x.abs().amax()
            x.clone()

        def quantizing(x: torch.Tensor, method: hb.Optimal, contract: str) -> Callable[[], object]:
            return lambda: hb.quantize(x, "nvfp4", contract, method)

        timed = [Timed("torch amax and clone", torch_floor)]
        for contract in ("transformer_engine", "modelopt"):
            for title, data, method in (
                ("headroom 1", x, hb.Optimal(headroom=1)), ("default", x, hb.Optimal()),
                ("default, uniform data", flat, hb.Optimal()),
            ):  # fmt: skip
                timed.append(Timed(f"{contract} {title}", quantizing(data, method, contract)))
        measure_rounds(timed, 200 if shape[0] == 16 else 40)
        for entry in timed:
            print(f"{shape} {entry.name}: {entry.wall_us:.1f} us, kernels {kernel_time(entry.call):.1f} us", flush=True)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device", file=sys.stderr)
        return 1
    failed = 0
    times()
    for name, check in CHECKS.items():
        begun = time.time()
        try:
            print(f"{name}: {check()} in {time.time() - begun:.1f} s", flush=True)
        except Exception as error:
            failed += 1
            print(
                f"FAILED {name} after {time.time() - begun:.1f} s: {type(error).__name__} {str(error)[:3000]}",
                flush=True,
            )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
