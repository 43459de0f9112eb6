"""The CUDA kernels' source built for the CPU, and called with numpy arrays. No test is in here."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfbyte.backends import Request
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.backends.gpu.constants import NUMBERS, PREPARED
from halfbyte.backends.gpu.cuda.table_kernels import CONTRACT, SOURCES, TABLE_KERNELS, Form, Operand
from halfbyte.backends.numbering import DTYPE_NUMBERS, METRICS
from halfbyte.backends.reference.search import exponent_of
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.contracts import NVFP4Rule, expressions
from halfbyte.contracts.arithmetic import stored_scale, tensor_scale

HERE = Path(__file__).parent

CALL = """
#include "cuda_on_cpu.h"
#include "{source}"
#include <vector>
extern "C" long long call(Operand operand) {{
    std::vector<uint4> tables(operand.groups * (TABLE_BYTES / 16), uint4{{~0u, ~0u, ~0u, ~0u}});  // no zeros by luck
    {build}
    operand.tables = tables.data();
    exact_blocks = 0;
    {kernel}(operand);
    return exact_blocks;
}}
"""


@dataclass(frozen=True)
class OnCpu:
    """One kernel, built by the host's compiler."""

    library: ctypes.CDLL

    def quantize(
        self,
        x: npt.NDArray[np.generic],
        request: Request,
        swizzled: bool = False,
        group_rows: int | None = None,
        amax: F32 | None = None,
    ) -> tuple[U8, U8, int]:
        """Codes, scale bytes, and how many blocks the tables left to exact arithmetic. Rows of x may be strided."""
        rule = self._rule(request)
        rows, width = x.shape
        group_rows = group_rows or rows
        columns, stride = width // 16, x.strides[0]
        tiles = -(-rows // 128) * -(-columns // 4) * 512
        codes = np.zeros((rows, width // 2), np.uint8)
        scales = np.zeros(tiles if swizzled else (rows, columns), np.uint8)
        parts = [x[start : start + group_rows] for start in range(0, rows, group_rows)]
        numbers = np.concatenate([numbers_of(part, rule, request, amax) for part in parts])
        form = Form(swizzled or stride != x.itemsize * width, swizzled, len(parts) > 1)
        operand = Operand(
            x.ctypes.data, codes.ctypes.data, scales.ctypes.data, numbers.ctypes.data, None, None, rows * columns,
            columns, stride // 16, len(parts), group_rows * columns,
        )  # fmt: skip
        return codes, scales, self._call(operand, rule, request, form)

    def quantize_list(self, tensors: list[npt.NDArray[np.generic]], request: Request) -> tuple[U8, U8]:
        """Codes and scale bytes of separate tensors, each with its own scale, one after the other."""
        rule = self._rule(request)
        counts = [x.size // 16 for x in tensors]
        before = np.cumsum([0, *counts])
        listed = np.array(
            [(x.ctypes.data, count, first) for x, count, first in zip(tensors, counts, before[:-1], strict=True)],
            np.int64,
        )
        total = int(before[-1])
        codes, scales = np.zeros(total * 8, np.uint8), np.zeros(total, np.uint8)
        numbers = np.concatenate([numbers_of(x, rule, request) for x in tensors])
        operand = Operand(
            None, codes.ctypes.data, scales.ctypes.data, numbers.ctypes.data, None, listed.ctypes.data, total, 1, 0,
            len(tensors), 1,
        )  # fmt: skip
        self._call(operand, rule, request, Form(grouped=True, listed=True))
        return codes, scales

    @staticmethod
    def _rule(request: Request) -> NVFP4Rule:
        rule = request.contract.rule(request.format)
        if not isinstance(rule, NVFP4Rule):
            raise TypeError("the kernels know NVFP4")
        return rule

    def _call(self, operand: Operand, rule: NVFP4Rule, request: Request, form: Form) -> int:
        kernel = choose(request)
        if not isinstance(kernel, ChosenKernel) or kernel.table is None:
            raise TypeError("no table serves this")
        squared = kernel.constants.get("METRIC") == METRICS.index("mse")
        chosen = (form.rows, form.swizzled, form.grouped, form.listed, kernel.constants.get("KIND", 0), squared)
        self.library.choose(*(int(number) for number in chosen), ctypes.c_float(float(rule.anchor(request.method))))
        contract = np.array([float(kernel.constants.get(name, 0)) for name in CONTRACT])
        self.library.choose_contract(contract.ctypes.data_as(ctypes.POINTER(ctypes.c_double)))
        self.library.call.restype = ctypes.c_longlong
        return int(self.library.call(operand))


BUILD = """
    gridDim.x = BUILD_BLOCKS;
    for (blockIdx.y = 0; blockIdx.y < operand.groups; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) {builder}(operand.numbers, tables.data());
    gridDim.x = 1;
    blockIdx.x = 0;
"""


def build(name: str, dtype: str, *definitions: str) -> OnCpu:
    """A kernel by its name, compiled without contraction; the library is gone with the process."""
    folder = Path(tempfile.mkdtemp())
    kernel = TABLE_KERNELS[name]
    before = "" if kernel.builder is None else BUILD.format(builder=kernel.builder)
    (folder / "call.cpp").write_text(CALL.format(source=kernel.source, build=before, kernel=kernel.function))
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    command.append(f"-DDTYPE={DTYPE_NUMBERS[dtype]}")
    subprocess.run(
        [*command, *definitions, f"-I{HERE}", f"-I{SOURCES}", "call.cpp", "-o", "call.so"], cwd=folder, check=True
    )
    return OnCpu(ctypes.CDLL(str(folder / "call.so")))


@np.errstate(all="ignore")
def numbers_of(x: npt.NDArray[np.generic], rule: NVFP4Rule, request: Request, given: F32 | None = None) -> F32:
    """What triton/scales.py, prepare, writes for a tensor, from the contract's own functions."""
    amaxes = np.abs(widen(x)).max().reshape(1) if given is None else given.reshape(1)
    t = tensor_scale(amaxes, rule, request.method, request.dtype)
    amax, factor = np.float32(t.amax.item()), np.float32(t.factor.item())
    multiplier = np.float32(stored_scale(rule, t)[1].item())
    searched = np.isfinite(multiplier) and multiplier > 0
    exponent = int(exponent_of(np.array([multiplier], np.float32))[0])
    first = -exponent if exponent > 0 else -exponent // 2
    known: dict[str, float] = {
        "amax": float(amax),
        "factor": float(factor),
        "inverse": float(np.float32(1) / factor),
        "folded": float(factor * expressions.SIXTH),
        "share_of_top": float(t.top / np.float32(6)),
        "share_of_amax": float(amax / np.float32(6)),
        "prescale": 2.0**first,
        "prescale_again": 2.0 ** (-exponent - first),
        "unit": float(np.ldexp(multiplier, -exponent)),
        "searched": float(searched),
        "no_underflow": float(2.0**-60 <= amax <= (131072 if request.dtype == "bf16" else 2.0**60)),
    }
    out = np.zeros(NUMBERS, np.float32)
    for name, value in known.items():
        out[PREPARED.index(name)] = value
    return out
