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
from halfbyte.backends.cuda_launch import KERNELS, SOURCES
from halfbyte.backends.reference import tensor_scale
from halfbyte.backends.reference_search import exponent_of
from halfbyte.backends.triton_rules import FACTORS, four_six_numbers
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.codec.blocks import split
from halfbyte.contracts import NVFP4Rule
from halfbyte.methods import FourSix

HERE = Path(__file__).parent

CALL = """
#include "cuda_on_cpu.h"
#include "{source}"
extern "C" long long call(const void* x, void* codes, void* scales, const float* numbers, long long blocks,
                          long long columns, long long row_quads) {{
    static Tables tables;
    {builder}(numbers, &tables);
    exact_blocks = 0;
    {kernel}(Operand{{(const uint4*)x, (uint2*)codes, (unsigned char*)scales, numbers, (const uint4*)&tables, blocks,
                      columns, row_quads}});
    return exact_blocks;
}}
"""


@dataclass(frozen=True)
class OnCpu:
    """One kernel, built by the host's compiler."""

    library: ctypes.CDLL

    def quantize(self, x: npt.NDArray[np.generic], request: Request, swizzled: bool = False) -> tuple[U8, U8, int]:
        """Codes, scale bytes, and how many blocks the tables left to exact arithmetic. Rows of x may be strided."""
        rule = request.contract.rule(request.format)
        if not isinstance(rule, NVFP4Rule):
            raise TypeError("the kernels know NVFP4")
        rows, width = x.shape
        columns, stride = width // 16, x.strides[0]
        codes = np.zeros((rows, width // 2), np.uint8)
        tiles = -(-rows // 128) * -(-columns // 4) * 512
        scales = np.zeros(tiles if swizzled else (rows, columns), np.uint8)
        kind: dict[str, int | float] = {"KIND": 0, "METRIC": 0}
        if isinstance(request.method, FourSix) and rule.four_six is not None:
            kind = four_six_numbers(rule.four_six, request.method, request)
        numbers = numbers_of(x, rule, request)
        in_rows = int(swizzled or stride != 2 * width)
        top = ctypes.c_float(float(rule.anchor(request.method)))
        self.library.choose(in_rows, int(swizzled), int(kind["KIND"]), int(kind["METRIC"]), top)
        pointer, size = ctypes.c_void_p, ctypes.c_longlong
        self.library.call.restype = size
        exact = self.library.call(
            pointer(x.ctypes.data), pointer(codes.ctypes.data), pointer(scales.ctypes.data),
            pointer(numbers.ctypes.data), size(rows * columns), size(columns), size(stride // 16),
        )  # fmt: skip
        return codes, scales, int(exact)


def build(name: str, *definitions: str) -> OnCpu:
    """A kernel by its name, compiled without contraction; the library is gone with the process."""
    folder = Path(tempfile.mkdtemp())
    (folder / "call.cpp").write_text(
        CALL.format(source=KERNELS[name].source, builder=KERNELS[name].builder, kernel=KERNELS[name].function)
    )
    command = ["g++", "-std=c++17", "-O2", "-mfma", "-ffp-contract=off", "-fPIC", "-shared", "-Wno-unknown-pragmas"]
    subprocess.run(
        [*command, *definitions, f"-I{HERE}", f"-I{SOURCES}", "call.cpp", "-o", "call.so"], cwd=folder, check=True
    )
    return OnCpu(ctypes.CDLL(str(folder / "call.so")))


@np.errstate(all="ignore")
def numbers_of(x: npt.NDArray[np.generic], rule: NVFP4Rule, request: Request) -> F32:
    """What triton_kernels_scales.prepare writes for a tensor, from the contract's own functions."""
    if rule.factor is not FACTORS[0] or rule.stored is None:
        raise TypeError("the kernels know TransformerEngine's formulas")
    t = tensor_scale(split(widen(x), 16), rule, request)
    amax, factor = np.float32(t.amax.item()), np.float32(t.factor.item())
    multiplier = np.float32(rule.multiplier(rule.stored(t).reshape(-1), t.top).item())
    searched = np.isfinite(multiplier) and multiplier > 0
    exponent = int(exponent_of(np.array([multiplier], np.float32))[0])
    first = -exponent if exponent > 0 else -exponent // 2
    out = np.zeros(16, np.float32)
    out[:4] = amax, factor, np.float32(1) / factor, factor * (np.float32(1) / np.float32(6))
    out[7:9] = np.ldexp(np.float32(1), [first, -exponent - first])
    out[9] = np.ldexp(multiplier, -exponent)
    out[10] = searched
    out[11] = 2.0**-60 <= amax <= 131072
    return out
