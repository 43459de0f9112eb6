"""The CUDA kernels build for Hopper and Blackwell without a card, with no fused operation that they did not ask for."""

from __future__ import annotations

import re
from importlib import resources

import pytest
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends import Request
from halfbyte.backends.gpu import dispatch
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.cuda import compile as cuda_compile
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.backends.gpu.cuda.table_kernels import TABLE_KERNELS, Form, definitions_of
from halfbyte.backends.gpu.launch import Launch, source_of
from halfbyte.methods import Method
from tests.backends.cases import FOUR_SIX, every_case
from tests.backends.gpu.compiled.builds import CAPABILITIES

TE = contracts.transformer_engine()
PLAIN = Form()
SEPARATE = "-D__fmaf_rn(x,y,z)=((x)*(y)+(z))"
"""Takes out every fused operation that the source asks for."""


def definitions(method: Method, form: Form = PLAIN) -> tuple[str, tuple[str, ...]]:
    request = Request(hb.get_format("nvfp4"), TE, method, (1, 16), "tensor", "bf16", device="cuda")
    kernel = choose(request)
    assert isinstance(kernel, ChosenKernel)
    assert kernel.table is not None
    return kernel.table, definitions_of(kernel, form)


def fused(ptx: bytes) -> int:
    return len(re.findall(rb"\bfma\.rn(?:\.ftz)?\.f32", ptx))


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize(
    ("method", "form"),
    [
        (hb.FourSix("mae", 448), Form()),
        (hb.FourSix("mse", 256, True), Form(rows=True, swizzled=True)),
        (hb.FourSix("mse", 448), Form(grouped=True, listed=True)),
        (hb.Optimal(), Form()),
        (hb.Optimal(), Form(copies=2, grouped=True)),
    ],
    ids=str,
)
def test_builds(method: Method, form: Form, capability: int) -> None:
    name, chosen = definitions(method, form)
    cubin = cuda_compile.compile_source(TABLE_KERNELS[name].source, f"sm_{capability}", chosen)
    assert cubin[:4] == b"\x7fELF"
    assert TABLE_KERNELS[name].builder.encode() in cubin
    assert TABLE_KERNELS[name].function.encode() in cubin


@pytest.mark.parametrize("method", [*FOUR_SIX, hb.Optimal()], ids=str)
def test_only_what_was_asked_for_is_fused(method: Method) -> None:
    name, chosen = definitions(method, Form(rows=True, swizzled=True))
    ptx = cuda_compile.compile_source(TABLE_KERNELS[name].source, "compute_90", chosen)
    assert fused(ptx) > 0
    assert b".ftz" not in ptx, "subnormal numbers would be lost"
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
    assert files >= {"blocks.cuh", "numbers.cuh", *(kernel.source for kernel in TABLE_KERNELS.values())}


def test_what_the_tables_serve() -> None:
    served = set()
    for case in every_case():
        for dtype in ("bf16", "fp16", "fp32"):
            request = case.request(dtype)
            kernel = choose(request)
            if isinstance(kernel, ChosenKernel) and kernel.table is not None:
                assert (dtype, request.tile) == ("bf16", (1, 16))
                served.add((case.contract.name, kernel.table))
    both = {(peer, name) for peer in ("transformer_engine", "miles", "flashinfer") for name in TABLE_KERNELS}
    assert served == both


def test_without_a_compiler_triton_serves_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Exception:
        raise hb.errors.BackendError("NVRTC was not found")

    monkeypatch.setattr(cuda_compile, "compiler", missing)
    monkeypatch.setattr(table_kernels, "_properties", lambda index: ((9, 0), 132))
    table_kernels._compiled.cache_clear()
    table_kernels._warn_once.cache_clear()
    name, chosen = definitions(hb.Optimal())
    with pytest.warns(UserWarning, match="Triton's kernels serve instead .* NVRTC was not found"):
        assert table_kernels._compiled(0, TABLE_KERNELS[name], chosen, 1) is None
    again = (*chosen, "-DOTHER")
    assert table_kernels._compiled(0, TABLE_KERNELS[name], again, 1) is None  # a second warning would be an error
    table_kernels._compiled.cache_clear()


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
    """With a card that can: the kernel gets the operand's addresses and sizes; without a table Triton is called."""
    x = torch.zeros(4, 64, dtype=torch.bfloat16)[:, :32]
    request = Request(hb.get_format("nvfp4"), TE, method, (1, 16), "tensor", "bf16", device="cuda")
    kernel = choose(request)
    assert isinstance(kernel, ChosenKernel)
    codes, scales = torch.zeros(4, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    numbers = torch.zeros(2, 16)
    seen: list[tuple[str | None, table_kernels.Operand, Form]] = []

    def launched(kernel: ChosenKernel, operand: table_kernels.Operand, form: Form, device: torch.device) -> bool:
        seen.append((kernel.table, operand, form))
        return True

    called: list[Launch] = []
    monkeypatch.setattr(table_kernels, "usable", lambda *arguments: True)
    monkeypatch.setattr(table_kernels, "launch", launched)
    monkeypatch.setattr(dispatch, "_launch_plain", called.append)
    source = source_of(x, request, 2, swizzled=False)
    dispatch.launch_blocks(Launch(kernel, request, source, codes, scales, numbers=numbers))
    if table is None:
        assert (len(called), seen) == (1, [])
        return
    ((name, operand, form),) = seen
    assert (name, form, called) == (table, Form(rows=True, grouped=True), [])
    assert (operand.x, operand.codes, operand.scales) == (x.data_ptr(), codes.data_ptr(), scales.data_ptr())
    assert (operand.numbers, operand.tables) == (numbers.data_ptr(), None)
    sizes = (operand.blocks, operand.columns, operand.row_quads, operand.groups, operand.group_blocks)
    assert sizes == (8, 2, 8, 2, 4)
