"""The CUDA C++ kernels on a card, whole tensors beside Triton's. Every check returns its number of comparisons."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Callable, Iterator

import torch

import halfbyte as hb
import halfbyte.gpu as gpu
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.contracts import NVFP4Rule
from tests.backends.cases import FOUR_SIX, VARIANTS
from tests.backends.gpu.card.checks import normal, same

METHODS: list[hb.methods.Method] = [*FOUR_SIX, hb.Optimal()]
NVFP4_CONTRACTS = [
    contract
    for contract in VARIANTS
    if isinstance(contract.rules.get("nvfp4"), NVFP4Rule) and not contract.transform.columnwise
]


@contextlib.contextmanager
def kernels(tables: bool) -> Iterator[None]:
    """CUDA's kernels for tensors of every size, or Triton's alone."""
    before, table_kernels.EVERY_SIZE = table_kernels.EVERY_SIZE, True
    setting = os.environ.pop("HALFBYTE_CUDA", "1")
    os.environ["HALFBYTE_CUDA"] = "1" if tables else "0"
    try:
        yield
    finally:
        os.environ["HALFBYTE_CUDA"] = setting
        table_kernels.EVERY_SIZE = before


def equal(got: hb.QuantizedTensor, expected: hb.QuantizedTensor, name: str) -> int:
    """On the device: these tensors are large."""
    for part in ("codes", "scales"):
        mine, wanted = getattr(got, part), getattr(expected, part)
        assert torch.equal(mine, wanted), f"{name}: {int((mine != wanted).sum())} bytes of the {part} differ"
    return 1


def inputs(dtype: torch.dtype = torch.bfloat16) -> Iterator[tuple[str, torch.Tensor]]:
    """Normal numbers, tails, blocks far below the amax, zeros, few values, any bits, amaxes of many significands."""
    yield "normal", normal(8192, 4096, dtype=dtype)
    yield "tails", (normal(4096, 4096, dtype=torch.float32) ** 3).to(dtype)
    blocks = torch.exp2(torch.randint(-24, 3, (2048, 256, 1), device="cuda").float())
    yield (
        "blocks of any size",
        (normal(2048, 4096, dtype=torch.float32).view(2048, 256, 16) * blocks).view(2048, 4096).to(dtype),
    )
    yield "uniform", (torch.rand(2048, 4096, device="cuda") - 0.5).to(dtype)
    yield "few values", torch.randint(-6, 7, (2048, 4096), device="cuda").to(dtype)
    sparse = normal(2048, 4096, dtype=dtype)
    yield "sparse", sparse * (torch.rand_like(sparse, dtype=torch.float32) < 0.05)
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    bits = torch.iinfo(integers)
    yield "bits", torch.randint(bits.min, bits.max + 1, (1024, 4096), device="cuda").to(integers).view(dtype)
    if dtype == torch.bfloat16:
        finite = torch.randint(100 << 7, 140 << 7, (2048, 4096), device="cuda", dtype=torch.int16)
        yield "bits in range", finite.view(torch.bfloat16)
    for significand in range(0, 128, 9):
        yield f"amax 1 + {significand}/128", normal(1024, 4096, dtype=dtype, seed=significand).clamp(-5, 5)


def beside_triton(dtype: torch.dtype) -> int:
    """Every method on every kind of input, whole tensors."""
    done = 0
    for name, x in inputs(dtype):
        amax = None
        if name.startswith("amax"):
            amax = 5 * (1 + int(name.split("+")[1].split("/")[0]) / 128)
        for method in METHODS:
            with kernels(False):
                expected = hb.quantize(x, "nvfp4", method=method, global_amax=amax, backend="gpu")
            with kernels(True):
                done += equal(hb.quantize(x, "nvfp4", method=method, global_amax=amax), expected, f"{name} {method}")
    return done


def tables_beside_triton() -> int:
    return beside_triton(torch.bfloat16)


def estimates_beside_triton() -> int:
    return beside_triton(torch.float16) + beside_triton(torch.float32)


def searches_of_contracts() -> int:
    """The least squared error under every contract, in every dtype, against the reference; zeros among the numbers."""
    done = 0
    for contract, dtype in itertools.product(NVFP4_CONTRACTS, (torch.bfloat16, torch.float16, torch.float32)):
        x = normal(48, 1024, dtype=torch.float32, seed=11) * torch.exp2(torch.arange(48, device="cuda") % 7)[:, None]
        x[5, :64], x[6, ::3] = 0.0, -0.0
        for given in (x.to(dtype), (x * 0.01).to(dtype)):
            expected = hb.quantize(given.cpu(), "nvfp4", contract, hb.Optimal(headroom=1), backend="reference")
            with kernels(True):
                done += same(hb.quantize(given, "nvfp4", contract, hb.Optimal(headroom=1), backend="gpu"), expected)
    return done


def tables_and_memory() -> int:
    """Strided rows, given outputs, tiles of scales, single blocks, graphs."""
    done = 0
    base = normal(300, 2064, seed=3)
    for method in (hb.FourSix("mae", 448), hb.FourSix("mse", 256, True), hb.Optimal()):
        for view in (base[:, :2048], base[::2], base[:, 16:], base[:1, :16], base[3:, :96], base[:, 5:517]):
            with kernels(False):
                expected = hb.quantize(view, "nvfp4", method=method)
                tiles = gpu.quantize_swizzled(view.contiguous(), method=method)
            with kernels(True):
                out = hb.quantize(torch.zeros_like(view.contiguous()), "nvfp4", method=method)
                got = hb.quantize(view, "nvfp4", method=method, out=out)
                assert got.codes is out.codes
                done += same(got, expected)
                swizzled = gpu.quantize_swizzled(view.contiguous(), method=method)
                assert all(torch.equal(mine, wanted) for mine, wanted in zip(swizzled[:2], tiles[:2], strict=True))
                done += 1
        with kernels(True):
            done += replayed(method)
    return done


def replayed(method: hb.methods.Method) -> int:
    """Captured once, replayed on other data whose amax differs: tables are built anew each time."""
    x = normal(512, 1024)
    out = hb.quantize(x, "nvfp4", method=method)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hb.quantize(x, "nvfp4", method=method, out=out)
    done = 0
    for seed in (5, 6):
        x.copy_(normal(512, 1024, seed=seed) * seed)
        graph.replay()
        torch.cuda.synchronize()
        with kernels(False):
            done += equal(captured, hb.quantize(x.clone(), "nvfp4", method=method), f"replay of {method}")
    return done


def tables_for_groups() -> int:
    """Experts as a 3-D tensor and as a list, a scale each or one for all."""
    done = 0
    experts = normal(37, 64, 352) * torch.exp2(torch.arange(37, device="cuda") - 18)[:, None, None].bfloat16()
    several = [normal(rows, width, seed=rows) for rows, width in ((3, 16), (100, 512), (16, 7168), (1, 32), (999, 48))]
    for method in METHODS:
        for shared in (False, True):
            for given in (experts, [part.clone() for part in experts], several, several[2:3]):
                with kernels(False):
                    wanted = gpu.quantize_experts(given, method=method, shared=shared)
                with kernels(True):
                    for got, expected in zip(
                        gpu.quantize_experts(given, method=method, shared=shared), wanted, strict=True
                    ):
                        done += equal(got, expected, f"experts, {method}")
    return done


CHECKS: dict[str, Callable[[], int]] = {
    check.__name__: check
    for check in (
        tables_beside_triton,
        estimates_beside_triton,
        searches_of_contracts,
        tables_and_memory,
        tables_for_groups,
    )
}
