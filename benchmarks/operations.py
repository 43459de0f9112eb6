"""The operations of halfbyte that are timed: every kernel through the public calls, and the reference's result."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

import halfbyte as hb
from benchmarks.machine import Array, choose_instruction_set, copier
from halfbyte.backends.cpu.plain import tensor_amax
from halfbyte.codec.bits import DTYPES, dtype_name
from halfbyte.testing import find_difference

BLOCK = 16
CHECKED = 64
"""The number of rows that are compared with the reference: half are the first rows, half the last."""
CHECKED_SEARCH = 32
"""The number of compared rows for searches, where the reference is slow because it tries every scale."""
TOKENS = 48
"""The number of activations from which the Hessians are computed."""
PLAIN = ("transformer_engine", "modelopt", "compressed_tensors", "torchao", "qwantize")
ONE_LEVEL = ("qwantize",)
"""Contracts without a global scale."""
ANY = "any"
"""The instruction set of operations that are not ours."""


@dataclass(frozen=True)
class Inputs:
    """One tensor in several equal buffers, so that the input of a call comes from memory and not from the cache."""

    buffers: list[Array]
    amax: np.float32
    row_amax: Array
    weights: Array
    activations: Array
    hessian: Array

    @property
    def x(self) -> Array:
        return self.buffers[0]


@dataclass(frozen=True)
class Operation:
    """A row of the table."""

    name: str
    call: Callable[[Array, int, int], object]
    """The result from (rows of a buffer, number of the buffer, threads)."""
    reference: Callable[[Array], object]
    """The result of the numpy reference for the rows with these indices."""
    checked: int = CHECKED
    bound_by_memory: bool = False
    ours: bool = True


def make_inputs(rows: int, columns: int, dtype: str, buffers: int) -> Inputs:
    """Gaussian weights of standard deviation 0.02, and the inputs of the weighted searches."""
    generator = np.random.default_rng(0)
    x = (generator.standard_normal((rows, columns), dtype=np.float32) * np.float32(0.02)).astype(DTYPES[dtype])
    row_amax = np.abs(x.astype(np.float32)).max(axis=1)
    activations = generator.standard_normal((TOKENS, columns), dtype=np.float32)
    return Inputs(
        buffers=[x, *(x.copy() for _ in range(buffers - 1))],
        amax=row_amax.max(),
        row_amax=row_amax,
        weights=generator.exponential(size=columns).astype(np.float32),
        activations=activations,
        hessian=hb.hessian_from_activations(activations),
    )


def make_operations(inputs: Inputs) -> list[Operation]:
    """All rows of the table, memcpy first. Kernels are given the amax; the pass that finds it is a separate row."""
    found = [_memcpy(inputs), _amax(inputs)]
    found += [plain(inputs, contract) for contract in PLAIN]
    found.append(_quantize(inputs, "plain NVFP4, 16×16 tiles", "nvfp4", tile=(16, 16)))
    found.append(_quantize(inputs, "plain NVFP4, row-scaled", "nvfp4", scaling="row"))
    for format in ("mxfp4", "mxfp8"):
        found.append(_quantize(inputs, f"{format.upper()}, ocp", format, bound_by_memory=True, contract="ocp"))
    shapes: dict[str, dict[str, Any]] = {
        "": {},
        ", 16×16 tiles": {"tile": (16, 16)},
        ", row-scaled": {"scaling": "row"},
    }
    for shape, options in shapes.items():
        for error in ("mae", "mse"):
            for fast in (False, True):
                name = f"4over6 {error.upper()} {'fast' if fast else 'strict'}{shape}"
                method = hb.FourSix(error, fast_error=fast)
                found.append(_quantize(inputs, name, "nvfp4", method=method, **options))
    searches = {
        "Optimal": hb.Optimal(),
        "Optimal, weighted": hb.Optimal(inputs.weights),
        "Hessian": hb.Hessian(inputs.hessian),
    }
    for name, search in searches.items():
        found.append(_quantize(inputs, name, "nvfp4", checked=CHECKED_SEARCH, method=search))
    for format in ("mxfp4", "mxfp8"):
        name = f"Optimal, {format.upper()} ocp"
        found.append(_quantize(inputs, name, format, checked=CHECKED_SEARCH, method=hb.Optimal(), contract="ocp"))
    found += _peer_searches(inputs)
    found.append(_cast(inputs))
    return found + [_dequantize(inputs, dtype) for dtype in ("bfloat16", "float32")]


def _peer_searches(inputs: Inputs) -> list[Operation]:
    """Searches that give the bits of one peer."""
    qwantize, four_six = hb.contracts.qwantize, hb.FourSix("mse", e4m3_max=256)
    found = [
        _quantize(inputs, "4over6 MSE, fouroversix", "nvfp4", contract="fouroversix", method=four_six),
        _quantize(inputs, "4over6 MSE, modelopt", "nvfp4", contract="modelopt", method=four_six),
    ]
    searches: dict[str, tuple[str, Any, hb.methods.Method]] = {
        "sweep, modelopt": ("nvfp4", "modelopt", hb.Sweep()),
        "Optimal, qwantize's own": ("nvfp4", qwantize(mode="nvfp4/optimal"), hb.Optimal()),
        "Optimal, qwantize's own MXFP4": ("mxfp4", qwantize(mode="mxfp4/optimal"), hb.Optimal()),
        "Hessian, qwantize's own": ("nvfp4", qwantize(mode="nvfp4/optimal_hessian"), hb.Hessian(inputs.hessian)),
    }
    for name, (format, contract, method) in searches.items():
        found.append(_quantize(inputs, name, format, checked=CHECKED_SEARCH, contract=contract, method=method))
    return found


def plain(inputs: Inputs, contract: str = "transformer_engine") -> Operation:
    """NVFP4 by amax."""
    return _quantize(inputs, f"plain NVFP4, {contract}", "nvfp4", bound_by_memory=True, contract=contract)


def _memcpy(inputs: Inputs) -> Operation:
    targets = [np.zeros(inputs.x.nbytes, np.uint8) for _ in range(min(2, len(inputs.buffers)))]
    copiers = {threads: copier(threads) for threads in (1, 2)}

    def call(x: Array, buffer: int, threads: int) -> Array:
        source, target = x.reshape(-1).view(np.uint8), targets[buffer % len(targets)][: x.nbytes]
        copiers[threads](target, source)
        return target.view(x.dtype).reshape(x.shape)

    return Operation("memcpy", call, lambda rows: inputs.x[rows], bound_by_memory=True, ours=False)


def _amax(inputs: Inputs) -> Operation:
    def call(x: Array, buffer: int, threads: int) -> Array:
        return tensor_amax(x, dtype_name(x.dtype), threads=threads)

    return Operation("amax", call, lambda rows: np.array([inputs.amax]), bound_by_memory=True)


def _quantize(
    inputs: Inputs, name: str, format: str, checked: int = CHECKED, bound_by_memory: bool = False, **options: Any
) -> Operation:
    def amax_of(rows: Any) -> dict[str, Any]:
        contract = options.get("contract")
        if format != "nvfp4" or getattr(contract, "name", contract) in ONE_LEVEL:
            return {}
        return {"global_amax": inputs.row_amax[rows] if options.get("scaling") == "row" else inputs.amax}

    def call(x: Array, buffer: int, threads: int) -> hb.QuantizedTensor:
        given = amax_of(np.s_[: len(x)])
        return hb.quantize(x, format, backend="cpu", threads=threads, **given, **options)

    def reference(rows: Array) -> hb.QuantizedTensor:
        return hb.quantize(inputs.x[rows], format, backend="reference", **amax_of(rows), **options)

    return Operation(name, call, reference, checked, bound_by_memory)


def _cast(inputs: Inputs) -> Operation:
    """MXFP4 to NVFP4 with unchanged codes. The speed counts bytes of the bfloat16 tensor that the codes represent."""
    q = hb.quantize(inputs.x, "mxfp4", contract="ocp")
    codes, scales = np.asarray(q.codes), np.asarray(q.scales)
    copies = [(codes.copy(), scales.copy()) for _ in inputs.buffers]

    def rows_of(buffer: int, rows: Any) -> hb.QuantizedTensor:
        some_codes, some_scales = copies[buffer][0][rows], copies[buffer][1][rows]
        shape = (len(some_codes), inputs.x.shape[1])
        return dataclasses.replace(q, shape=shape, codes=some_codes, scales=some_scales)

    def call(x: Array, buffer: int, threads: int) -> hb.QuantizedTensor:
        return hb.cast(rows_of(buffer, np.s_[: len(x)]), "nvfp4", threads=threads)[0]

    def reference(rows: Array) -> hb.QuantizedTensor:
        # By definition m belongs to the whole tensor, and every scale is 2**(k - m), once for each half of a block.
        m = int(scales.max()) - 127 - 8
        powers = np.ldexp(np.float32(1), scales[rows].astype(np.int32) - 127 - m)
        doubled = np.repeat(powers.astype(ml_dtypes.float8_e4m3fn).view(np.uint8), 2, axis=1)
        shape = (len(rows), inputs.x.shape[1])
        scale = np.ldexp(np.float32(1), m)
        return dataclasses.replace(
            hb.cast(q, "nvfp4")[0],
            shape=shape,
            codes=codes[rows],
            scales=doubled,
            stored_scale=scale,
        )

    return Operation("cast MXFP4 to NVFP4", call, reference, bound_by_memory=True)


def _dequantize(inputs: Inputs, dtype: str) -> Operation:
    q = hb.quantize(inputs.x, "nvfp4", global_amax=inputs.amax)
    codes, scales = np.asarray(q.codes), np.asarray(q.scales)
    copies = [(codes.copy(), scales.copy()) for _ in inputs.buffers]

    def rows_of(buffer: int, rows: Any) -> hb.QuantizedTensor:
        some_codes, some_scales = copies[buffer][0][rows], copies[buffer][1][rows]
        shape = (len(some_codes), inputs.x.shape[1])
        return dataclasses.replace(q, shape=shape, codes=some_codes, scales=some_scales)

    def call(x: Array, buffer: int, threads: int) -> Array:
        return np.asarray(hb.dequantize(rows_of(buffer, np.s_[: len(x)]), dtype, backend="cpu", threads=threads))

    def reference(rows: Array) -> Array:
        return np.asarray(hb.dequantize(rows_of(0, rows), dtype, backend="reference"))

    return Operation(f"dequantize to {dtype}", call, reference, bound_by_memory=True)


def prepare_for(isa: str) -> Callable[[int], None]:
    """A function that selects an instruction set before a call."""
    return lambda buffer: None if isa == ANY else choose_instruction_set(isa)


def checked_rows(rows: int, checked: int) -> Array:
    """Indices of the rows that are compared: the first and the last rows, in whole tiles of 16."""
    if rows <= checked:
        return np.arange(rows)
    return np.concatenate([np.arange(checked // 2), np.arange(rows - checked // 2, rows)])


def parts(result: object) -> dict[str, Array]:
    """The arrays of a result by name. If there is one scale per tensor, it is repeated on every row."""
    if not isinstance(result, hb.QuantizedTensor):
        return {"values": np.asarray(result)}
    arrays = {"codes": np.asarray(result.codes), "scales": np.asarray(result.scales)}
    rows = len(arrays["codes"])
    for name, value in (("global_scale", result.global_scale), ("stored_scale", result.stored_scale)):
        if value is not None:
            arrays[name] = np.broadcast_to(np.asarray(value), (rows,))
    return arrays


def expected(operation: Operation, rows: int) -> dict[str, Array]:
    """The result of the reference for the rows of an operation that are compared."""
    return parts(operation.reference(checked_rows(rows, operation.checked)))


def sample(result: object, rows: Array) -> dict[str, Array]:
    """Copies of some rows of a result. Numbers for the whole tensor, such as the amax, are copied whole."""
    return {name: array[rows] if array.size > 1 else array for name, array in parts(result).items()}


def checksum(result: object) -> int:
    """CRC of every byte of a result."""
    crc = 0
    for array in parts(result).values():
        crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, crc)
    return crc


def differences(got: object, expected: dict[str, Array]) -> list[str]:
    """The differences, part by part; empty if every bit is the same."""
    if not isinstance(got, dict) or got.keys() != expected.keys():
        return [f"{got!r} where {sorted(expected)} are expected"]
    found = ((name, find_difference(got[name], expected[name])) for name in expected)
    return [f"{name}: {difference.reason}" for name, difference in found if difference is not None]
