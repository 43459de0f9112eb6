"""The CUDA kernels build for Hopper and Blackwell without a card, with no fused operation that they did not ask for."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends import Request
from halfbyte.backends.gpu import dispatch
from halfbyte.backends.gpu import launch as launch_module
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.cuda import compile as cuda_compile
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.backends.gpu.cuda.compile import CudaKernel
from halfbyte.backends.gpu.cuda.table_kernels import TABLE_KERNELS, Form, definitions_of
from halfbyte.backends.gpu.driver.commands import Address, Slot
from halfbyte.backends.gpu.launch import Launch, Matrix, source_of
from halfbyte.contracts import Contract
from halfbyte.methods import Method
from tests.backends.cases import FOUR_SIX, every_case
from tests.backends.gpu.compiled.builds import CAPABILITIES

TE = contracts.transformer_engine()
SIZES = {"blocks": 1, "columns": 1, "row_quads": 2, "groups": 1, "group_blocks": 1}
REQUEST = Request(hb.get_format("nvfp4"), TE, hb.Optimal(), (1, 16), "tensor", "bf16", device="cuda")
PLAIN = Form()
SEPARATE = "-D__fmaf_rn(x,y,z)=((x)*(y)+(z))"
"""Takes out every fused operation that the source asks for."""


MODELOPT, QWANTIZE, FOUROVERSIX = contracts.modelopt(), contracts.qwantize(), contracts.fouroversix()


def definitions(
    method: Method, form: Form = PLAIN, contract: Contract = TE, dtype: str = "bf16"
) -> tuple[str, tuple[str, ...]]:
    request = Request(hb.get_format("nvfp4"), contract, method, (1, 16), "tensor", dtype, device="cuda")
    kernel = choose(request)
    assert isinstance(kernel, ChosenKernel)
    assert kernel.table is not None
    return kernel.table, definitions_of(kernel, form)


def fused(ptx: bytes) -> int:
    return len(re.findall(rb"\bfma\.rn(?:\.ftz)?\.f32", ptx))


BUILDS = [
    (hb.FourSix("mae", 448), Form(), TE, "bf16"),
    (hb.FourSix("mse", 256, True), Form(rows=True, swizzled=True), TE, "bf16"),
    (hb.FourSix("mse", 448), Form(grouped=True, listed=True), TE, "bf16"),
    (hb.FourSix("mae", 448), Form(rows=True), TE, "fp16"),
    (hb.FourSix("mse", 256), Form(grouped=True), TE, "fp32"),
    (hb.Optimal(), Form(), TE, "bf16"),
    (hb.Optimal(), Form(copies=2, grouped=True), MODELOPT, "bf16"),
    (hb.Optimal(), Form(), FOUROVERSIX, "bf16"),
    (hb.Optimal(), Form(swizzled=True, rows=True), QWANTIZE, "fp16"),
    (hb.Optimal(), Form(grouped=True, listed=True), MODELOPT, "fp32"),
]


def check(method: Method, form: Form, contract: Contract, dtype: str, capability: int) -> None:
    """The kernel builds, and its image has the functions that are asked for."""
    name, chosen = definitions(method, form, contract, dtype)
    table = TABLE_KERNELS[name]
    cubin = cuda_compile.compile_source(table.source, f"sm_{capability}", chosen)
    assert cubin[:4] == b"\x7fELF"
    assert table.function.encode() in cubin
    assert table.builder is None or table.builder.encode() in cubin


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(("method", "form", "contract", "dtype"), BUILDS, ids=str)
def test_builds(method: Method, form: Form, contract: Contract, dtype: str, capability: int) -> None:
    check(method, form, contract, dtype, capability)


@pytest.mark.parametrize(
    ("method", "contract", "dtype"),
    [
        *((method, TE, "bf16") for method in (*FOUR_SIX, hb.Optimal())),
        *((hb.Optimal(), contract, "fp16") for contract in (TE, MODELOPT, QWANTIZE, FOUROVERSIX)),
        (hb.Optimal(), MODELOPT, "fp32"),
        (hb.FourSix("mse", 448), TE, "fp16"),
        (hb.FourSix("mae", 448), TE, "fp32"),
    ],
    ids=str,
)
def test_only_what_was_asked_for_is_fused(method: Method, contract: Contract, dtype: str) -> None:
    name, chosen = definitions(method, Form(rows=True, swizzled=True), contract, dtype)
    ptx = cuda_compile.compile_source(TABLE_KERNELS[name].source, "compute_90", chosen)
    assert fused(ptx) > 0
    # A reciprocal is estimated of normal numbers only.
    assert b".ftz" not in ptx.replace(b"rcp.approx.ftz.f32", b""), "subnormal numbers would be lost"
    assert fused(cuda_compile.compile_source(TABLE_KERNELS[name].source, "compute_90", (*chosen, SEPARATE))) == 0


def test_contraction_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name, chosen = definitions(hb.FourSix("mse", 448))
    monkeypatch.setattr(cuda_compile, "OPTIONS", ("--std=c++17", "--fmad=true"))
    assert fused(cuda_compile.compile_source(TABLE_KERNELS[name].source, "compute_90", (*chosen, SEPARATE))) > 0


def test_errors_of_the_compiler_are_told() -> None:
    with pytest.raises(hb.HalfbyteError, match=r"NVRTC cannot compile four_six\.cu for sm_90: .*error"):
        cuda_compile.compile_source("four_six.cu", "sm_90", ("-DTHREADS=nonsense",))


def test_sources_belong_to_the_package() -> None:
    files = {entry.name for entry in resources.files("halfbyte.backends.gpu.cuda").iterdir()}
    assert files >= {
        "blocks.cuh",
        "contract.cuh",
        "four_six.cuh",
        "halves.cuh",
        "numbers.cuh",
        "search.cuh",
        "values.cuh",
        *(kernel.source for kernel in TABLE_KERNELS.values()),
    }


def test_what_the_cuda_kernels_serve() -> None:
    """The search under every contract; 4over6 by TransformerEngine's."""
    served, left = set(), set()
    for case in every_case():
        if case.format != "nvfp4" or case.method not in ("optimal", "mae 448", "mse 256") or case.block != 16:
            continue
        for dtype in ("bf16", "fp16", "fp32"):
            request = case.request(dtype)
            kernel = choose(request)
            assert isinstance(kernel, ChosenKernel)
            key = (case.contract.name, case.method == "optimal", dtype)
            if kernel.table is not None:
                assert request.tile == (1, 16)
                assert kernel.table == KERNEL_OF[case.method == "optimal"][dtype]
                served.add(key)
            elif request.tile == (1, 16):
                left.add(key)
    own_formulas = {("fouroversix", False, dtype) for dtype in ("bf16", "fp16", "fp32")}
    assert left == own_formulas
    assert not left & served


KERNEL_OF = {
    True: {"bf16": "optimal", "fp16": "estimate_halves", "fp32": "estimate"},
    False: {"bf16": "four_six", "fp16": "four_six_estimate", "fp32": "four_six_estimate"},
}
"""By whether it is the search, and by dtype."""


def test_without_a_compiler_triton_serves_and_says_so_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> Exception:
        raise hb.errors.BackendError("NVRTC was not found")

    monkeypatch.setattr(cuda_compile, "compiler", missing)
    monkeypatch.setattr(table_kernels, "_properties", lambda index: ((9, 0), 132))
    monkeypatch.setattr(table_kernels, "shared_memory_of", lambda index: 232448)
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path))
    cuda_compile.compile_source.cache_clear()
    table_kernels._warn_once.cache_clear()
    kernel, device = choose(REQUEST), torch.device("cuda", 0)
    assert isinstance(kernel, ChosenKernel)
    with pytest.warns(UserWarning, match="Triton's kernels serve instead .* NVRTC was not found"):
        assert table_kernels.commands(kernel, SIZES, Form(), device) is None
    assert (
        table_kernels.commands(kernel, SIZES | {"blocks": 2}, Form(), device) is None
    )  # a second warning would be an error


def test_who_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large tensors on Hopper and later go to the tables; small ones, older cards and a switch leave them to Triton."""
    card, cpu = torch.device("cuda", 0), torch.device("cpu")
    monkeypatch.setattr(table_kernels, "_properties", lambda index: ((9, 0), 132))
    monkeypatch.delenv("HALFBYTE_CUDA", raising=False)
    many, groups = TABLE_KERNELS["four_six"].smallest, 64
    assert table_kernels.usable("four_six", card, many, 1)
    assert not table_kernels.usable("four_six", card, many - 1, 1)
    assert not table_kernels.usable("four_six", cpu, many, 1)
    assert table_kernels.usable("optimal", card, groups * table_kernels.SMALLEST_GROUP, groups)
    assert not table_kernels.usable("optimal", card, groups * table_kernels.SMALLEST_GROUP - 1, groups)
    assert not table_kernels.usable("optimal", card, 1 << 40, table_kernels.MOST_GROUPS + 1)
    monkeypatch.setattr(table_kernels, "EVERY_SIZE", True)
    assert table_kernels.usable("four_six", card, 1, 1)
    monkeypatch.setenv("HALFBYTE_CUDA", "0")
    assert not table_kernels.usable("four_six", card, many, 1)
    monkeypatch.setenv("HALFBYTE_CUDA", "1")
    monkeypatch.setattr(table_kernels, "_properties", lambda index: ((8, 9), 142))
    assert not table_kernels.usable("four_six", card, many, 1)


@pytest.mark.parametrize(
    ("method", "table"), [(hb.FourSix("mse", 256), "four_six"), (hb.Optimal(), "optimal"), (hb.Amax(), None)]
)
def test_the_dispatch_hands_blocks_to_the_tables(
    method: Method, table: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a card that can: the kernel gets the operand's places and sizes; without a table Triton serves."""
    request = Request(hb.get_format("nvfp4"), TE, method, (1, 16), "tensor", "bf16", device="cuda")
    kernel = choose(request)
    assert isinstance(kernel, ChosenKernel)
    monkeypatch.setattr(table_kernels, "usable", lambda *arguments: True)
    monkeypatch.setattr(table_kernels, "_properties", lambda index: ((9, 0), 132))
    monkeypatch.setattr(table_kernels, "shared_memory_of", lambda index: 232448)
    monkeypatch.setattr(CudaKernel, "image", lambda kernel, architecture: None)
    monkeypatch.setattr(launch_module, "assembly", lambda device: 1)
    source = source_of(Matrix(4, 32, 8, contiguous=False), request, 2, swizzled=False)
    commands, table_bytes = dispatch.block_commands(Launch(kernel, request, source, torch.device("cuda", 0)))
    if table is None:
        assert ([command.kernel.name for command in commands], table_bytes) == (["plain.quantize_nvfp4"], 0)
        return
    build, quantize = commands
    description = table_kernels.TABLE_KERNELS[table]
    assert (build.kernel.name, quantize.kernel.name) == (description.builder, description.function)
    assert (build.grid, quantize.grid, table_bytes) == (
        (description.build_grid, 2), (1, 1), 2 * description.table_bytes
    )  # fmt: skip
    assert (build.overlaps, quantize.overlaps) == (False, True)
    assert isinstance(quantize.kernel, CudaKernel)
    assert {"-DROWS=1", "-DGROUPED=1"} <= set(quantize.kernel.definitions)
    slots = [argument.slot for argument in quantize.arguments if isinstance(argument, Address)]
    assert slots == [Slot.X, Slot.CODES, Slot.SCALES, Slot.SMALL, Slot.TABLES, Slot.X]
    assert quantize.arguments[6:] == (8, 2, 8, 2, 4)
    assert quantize.kernel.words == len(quantize.arguments)
