"""Rows of benchmarks.gpu for every contract and dtype: SSE-optimal, 4over6, MXFP4 and MXFP8.

What the kernels give is compared with the reference on a few rows, and for 4over6 and TransformerEngine's contract as a
whole with what the Triton kernels give.
"""

from __future__ import annotations

import functools

import torch

import halfbyte as hb
from benchmarks.gpu import NAMES, Row, block_kernel, equal, graph_time, without_tables
from halfbyte.backends.gpu.batch import group_amaxes
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.methods import Method

CONTRACTS: dict[str, Contract] = {
    "transformer_engine": hb.contracts.transformer_engine(),
    "modelopt": hb.contracts.modelopt(),
    "modelopt, static": hb.contracts.modelopt(mode="max"),
    "compressed_tensors": hb.contracts.compressed_tensors(),
    "torchao": hb.contracts.torchao(),
    "torchao, one level": hb.contracts.torchao(two_level=False),
    "fouroversix": hb.contracts.fouroversix(),
    "qwantize": hb.contracts.qwantize(),
    "flashinfer": hb.contracts.flashinfer(),
    "vllm": hb.contracts.vllm(),
}
"""miles and FlashInfer's other modes have TransformerEngine's formulas."""

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
BESIDE_TRITON = ("transformer_engine",)


def measure_contracts(rows: int, width: int, bandwidth: float) -> list[Row]:
    """All rows for one shape."""
    normal = torch.empty(rows, width, device="cuda").normal_()
    found = []
    for dtype in DTYPES:
        x = normal.to(dtype)
        for name, contract in CONTRACTS.items():
            found.append(nvfp4(x, f"SSE-optimal, {name}", contract, hb.Optimal(), bandwidth, name in BESIDE_TRITON))
        if dtype != torch.bfloat16:
            for error in ("mae", "mse"):
                method, name = hb.FourSix(error, 448), f"4over6 strict {error.upper()}"
                found.append(nvfp4(x, name, CONTRACTS["transformer_engine"], method, bandwidth, True))
        for format in ("mxfp4", "mxfp8"):
            found.append(mx(x, format.upper(), format, hb.Amax(), bandwidth))
        found.append(mx(x, "SSE-optimal MXFP4", "mxfp4", hb.Optimal(), bandwidth))
    return found


def nvfp4(x: torch.Tensor, name: str, contract: Contract, method: Method, bandwidth: float, beside: bool) -> Row:
    """One NVFP4 row: the kernels alone, and the whole call with the amax given."""
    rule = contract.rule(hb.get_format("nvfp4"))
    amax = group_amaxes(x, x.shape[0])
    given = amax if isinstance(rule, NVFP4Rule) and rule.stored is not None else None
    call = functools.partial(hb.quantize, x, "nvfp4", contract, method, global_amax=given)
    q = call()
    same = equal(q, x, method, "nvfp4", None if given is None else float(amax), contract)
    alone, triton = block_kernel(x, method, amax, q), None
    if beside:
        other = without_tables(call)
        same = same and all(torch.equal(getattr(q, part), getattr(other, part)) for part in ("codes", "scales"))
        triton = without_tables(functools.partial(graph_time, alone, 3, 5))
    moved = x.nbytes + x.numel() // 2 + x.numel() // 16
    times = graph_time(alone), graph_time(functools.partial(call, out=q))
    return row(x, name, times, moved / bandwidth, same, triton)


def mx(x: torch.Tensor, name: str, format: str, method: Method, bandwidth: float) -> Row:
    """One row with power-of-two scales, which is one kernel: the whole call."""
    m = hb.quantize(x, format, method=method)
    time = graph_time(functools.partial(hb.quantize, x, format, method=method, out=m))
    size = x.numel() // (2 if format == "mxfp4" else 1) + x.numel() // 32
    return row(x, name, (time, time), (x.nbytes + size) / bandwidth, equal(m, x, method, format, None), None)


def row(x: torch.Tensor, name: str, times: tuple[float, float], floor: float, same: bool, triton: float | None) -> Row:
    shape, bits = "x".join(map(str, x.shape)), "equal" if same else "DIFFERENT"
    return Row(shape, f"{NAMES[x.dtype]} {name}", *times, floor, bits, triton)
