"""Which kernels the usual calls need, so that they can be compiled before anybody waits for them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from halfbyte.backends.gpu.choose import ChosenKernel, choose, choose_decoder
from halfbyte.backends.gpu.constants import ASSEMBLY, FP4_ASSEMBLY
from halfbyte.backends.gpu.cuda import table_kernels
from halfbyte.backends.gpu.cuda.compile import CudaKernel
from halfbyte.backends.gpu.dispatch import OWN, TENSOR, VALUE, quantization
from halfbyte.backends.gpu.driver.commands import Kernel
from halfbyte.backends.gpu.driver.run import architecture_of
from halfbyte.backends.gpu.driver.triton_kernels import TritonKernel
from halfbyte.backends.gpu.launch import Matrix
from halfbyte.backends.gpu.programs import decoding_for
from halfbyte.backends.protocol import Reason
from halfbyte.errors import BackendError, InputError, UnsupportedError
from halfbyte.methods import FourSix
from halfbyte.request import Request, resolve, resolve_decoding

USUAL = (
    ("nvfp4", "transformer_engine", "amax"),
    ("nvfp4", "transformer_engine", FourSix()),
    ("nvfp4", "transformer_engine", "optimal"),
    ("nvfp4", "modelopt", "amax"),
    ("nvfp4", "modelopt", "optimal"),
    ("nvfp4", "compressed_tensors", "amax"),
    ("nvfp4", "compressed_tensors", "optimal"),
    ("nvfp4", "torchao", "amax"),
    ("mxfp4", "ocp", "amax"),
    ("mxfp4", "ocp", "optimal"),
    ("mxfp8", "ocp", "amax"),
)
"""Format, contract and method of the usual calls."""

SHARED_MEMORY = {"sm_90": 232448, "sm_100": 232448, "sm_103": 232448}
"""Bytes of shared memory that a block of threads can get; other cards have at least 101376."""
OTHERS_SHARED_MEMORY = 101376

OLDEST = 89


@dataclass(frozen=True)
class Usual:
    """A usual call and its kernels."""

    title: str
    kernels: tuple[TritonKernel | CudaKernel, ...]


def visible_architectures() -> list[str]:
    """Those of the cards in this machine, without repetition."""
    import torch

    return list(dict.fromkeys(architecture_of(index) for index in range(torch.cuda.device_count())))


def usual_calls(architecture: str, formats: list[str], dtypes: list[str]) -> Iterator[Usual]:
    """The usual calls of these formats and dtypes, with the kernels that serve tensors of all sizes."""
    number = architecture.removeprefix("sm_")
    if not (architecture.startswith("sm_") and number.isdecimal() and int(number) >= OLDEST):
        raise InputError(f"unknown architecture {architecture!r}: give one such as sm_90, sm_{OLDEST} or newer")
    for format, contract, method in USUAL:
        for dtype in dtypes if format in formats else []:
            request = resolve(format, contract, method, dtype=dtype, device="cuda")
            title = f"{format} {contract} {request.method.name} {dtype}"
            yield Usual(title, tuple(dict.fromkeys(_kernels(request, architecture))))
    for format, contract in dict.fromkeys((format, contract) for format, contract, _ in USUAL):
        for dtype in dtypes if format in formats else []:
            request = resolve(format, contract, "amax", device="cuda")
            decoding = resolve_decoding(request.format, request.contract, request.method, device="cuda")
            yield Usual(f"{format} {contract} decoded to {dtype}", tuple(_decoders(decoding, dtype, architecture)))


def _kernels(request: Request, architecture: str) -> Iterator[TritonKernel | CudaKernel]:
    """Programs made for the CPU have the same commands, but for assembly and the kernels that only a card can have."""
    import torch

    kernel, width = choose(request), request.format.block
    if isinstance(kernel, Reason):
        raise BackendError(f"backend gpu cannot do this: {kernel}")
    for rows in (1, 1 << 13, 1 << 20):  # one part for the amax, and many; all tiles and candidates of a survey
        for whose in (OWN, VALUE, TENSOR):
            matrix = Matrix(rows, width, 1, contiguous=True)
            made = quantization(kernel, request, matrix, rows, False, whose, torch.device("cpu"))
            yield from _for_card(made.program.kernels(), architecture)
    yield from _cuda_kernels(kernel, architecture)


def _cuda_kernels(kernel: ChosenKernel, architecture: str) -> Iterator[CudaKernel]:
    if kernel.table is None or int(architecture.removeprefix("sm_")) < 10 * table_kernels.OLDEST[0]:
        return
    shared = SHARED_MEMORY.get(architecture, OTHERS_SHARED_MEMORY)
    for found in table_kernels.kernels(kernel, table_kernels.Form(), shared):
        if found is not None:
            yield found


def _decoders(request: Request, dtype: str, architecture: str) -> Iterator[TritonKernel]:
    import torch

    decoder = choose_decoder(request)
    if isinstance(decoder, Reason):
        raise BackendError(f"backend gpu cannot do this: {decoder}")
    program = decoding_for(decoder, request, 1, request.format.block, 1, dtype, torch.device("cpu"))
    yield from _for_card(program.kernels(), architecture)


def _for_card(kernels: Iterable[Kernel], architecture: str) -> Iterator[TritonKernel]:
    """The kernels as a card of that architecture launches them."""
    assembly = FP4_ASSEMBLY if int(architecture.removeprefix("sm_")) >= 100 else ASSEMBLY
    for kernel in kernels:
        if not isinstance(kernel, TritonKernel):
            raise TypeError("a program for the CPU has kernels of Triton alone")
        constants = tuple((name, assembly if name == "ASM" else value) for name, value in kernel.constants)
        yield replace(kernel, constants=constants)


def build(calls: list[Usual], architecture: str, jobs: int) -> Iterator[tuple[Usual, int, float]]:
    """Compile what is not on disk yet. For each call: how many kernels were compiled, and seconds since the start."""
    from concurrent.futures import ProcessPoolExecutor  # slow to import, and nobody else needs them
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    begun = time.perf_counter()
    missing = [kernel for call in calls for kernel in call.kernels if not kernel.is_cached(architecture)]
    waiting = dict.fromkeys(missing)
    if not waiting:
        yield from ((call, 0, time.perf_counter() - begun) for call in calls)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {kernel: pool.submit(_compile, kernel, architecture) for kernel in waiting}
        for call in calls:
            mine = [kernel for kernel in call.kernels if kernel in waiting]
            for kernel in mine:
                try:
                    futures[kernel].result()
                except BrokenProcessPool as error:
                    raise UnsupportedError(
                        f"a process died while it compiled kernels for {architecture}: the compiler here knows no such "
                        "compute capability, or memory ran out (then give fewer --jobs)"
                    ) from error
                del waiting[kernel]
            yield call, len(mine), time.perf_counter() - begun


def _compile(kernel: TritonKernel | CudaKernel, architecture: str) -> None:
    kernel.image(architecture)
