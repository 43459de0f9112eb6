"""What a call means, found once and kept: the request and the backend for a combination of arguments.

A call looks its arguments up here. Only a combination that is new is resolved and checked. The key has the identity of
every object that decides the answer: formats, contracts, methods and the tables of their names. The kept entry holds
these objects, so no other object can get their identity.
"""

from __future__ import annotations

import sys
from typing import Any, NamedTuple, TypeVar

import numpy as np

from halfbyte import backends
from halfbyte.arrays import DTYPE_NAMES, Array, check_dense, is_torch, output_dtype, to_numpy
from halfbyte.backends import WholeCall, WholeDecode
from halfbyte.backends.protocol import Backend
from halfbyte.backends.threads import check_threads
from halfbyte.codec.bits import dtype_name
from halfbyte.contracts import CONTRACTS
from halfbyte.contracts.spec import Rule
from halfbyte.foreign_arrays import NeedsConversion, needs_conversion
from halfbyte.formats import FORMATS
from halfbyte.methods import METHODS, Amax, FourSix, Method, Optimal, Sweep
from halfbyte.request import Request, resolve, resolve_decoding
from halfbyte.types import QuantizedTensor

T = TypeVar("T")


class Prepared(NamedTuple):
    """What is known of a call before its data."""

    request: Request
    engine: Backend[Any]
    rule: Rule
    """The contract's rule when the entry was made. A contract's table of rules may be changed."""
    whole: WholeCall | None
    """One function for the whole of a small call on the CPU, if the backend has one."""
    held: tuple[object, ...]
    """The objects whose identities are in the key."""


class PreparedDecode(NamedTuple):
    """What is known of a tensor to decode before its data."""

    request: Request
    engine: Backend[Any]
    dtype: np.dtype[np.generic]
    rule: Rule
    whole: WholeDecode | None
    held: tuple[object, ...]


_KEPT: dict[tuple[object, ...], Prepared] = {}
_KEPT_DECODING: dict[tuple[object, ...], PreparedDecode] = {}
MOST_KEPT = 512


def prepare(
    x: Array,
    format: Any,
    contract: Any,
    method: Any,
    block: Any,
    tile: Any,
    scaling: Any,
    backend: Any,
    threads: Any,
) -> Prepared:
    """The request and the backend for the arguments of `quantize`; see there for their meaning."""
    named_format = FORMATS.get(format, format) if type(format) is str else format
    named_contract = CONTRACTS.get(contract, contract) if type(contract) is str else contract
    named_method = METHODS.get(method) or sys.intern(method) if type(method) is str else method
    operand: object = None
    if is_torch(x):
        operand = (x.dtype, x.layout, "nested" if x.is_nested else x.is_cpu or x.device.type)
    elif isinstance(x, np.ndarray):
        operand = x.dtype
    options = None
    if not (block is tile is scaling is threads is None):
        options = repr((block, tile, scaling, threads))
    key = (
        id(named_format), id(named_contract), id(named_method), options, operand,
        backend if type(backend) is str else id(backend), backends.state(backend),
    )  # fmt: skip
    kept = _KEPT.get(key)
    if kept is not None and kept.request.contract.rules.get(kept.request.format.name) is kept.rule:
        return kept
    check_threads(threads)
    request = resolve(
        format,
        contract,
        method,
        block=block,
        tile=tile,
        scaling=scaling,
        dtype=_dtype_of(x),
        threads=threads,
        device=str(x.device.type) if is_torch(x) else "numpy",
    )
    engine = backends.choose_backend(backend, request)
    whole = engine.whole_call(request) if isinstance(engine, backends.Cpu) else None
    held = named_format, named_contract, named_method, backend
    made = Prepared(request, engine, request.contract.rule(request.format), whole, held)
    if holds_no_arrays(request.method):
        _keep(_KEPT, key, made)
    return made


def prepare_decoding(q: QuantizedTensor, dtype: Any, backend: Any, threads: Any) -> PreparedDecode:
    """The request, the backend and the dtype for the arguments of `dequantize`; see there for their meaning."""
    format, contract, method, codes = q.format, q.contract, q.method, q.codes
    device = ("cpu" if codes.is_cpu else codes.device.type) if is_torch(codes) else "numpy"
    key = (
        id(format), id(contract), id(method), dtype if type(dtype) is str else id(dtype),
        None if threads is None else repr(threads), device, backend if type(backend) is str else id(backend),
        backends.state(backend),
    )  # fmt: skip
    kept = _KEPT_DECODING.get(key)
    if kept is not None and contract.rules.get(format.name) is kept.rule:
        return kept
    check_threads(threads)
    wanted = output_dtype(dtype)
    request = resolve_decoding(format, contract, method, threads, device)
    rule = contract.rule(format)
    engine = backends.choose_backend(backend, request, decoding=True)
    whole = engine.whole_decode(request, wanted) if isinstance(engine, backends.Cpu) else None
    made = PreparedDecode(request, engine, wanted, rule, whole, (format, contract, method, dtype, backend))
    if holds_no_arrays(method):
        _keep(_KEPT_DECODING, key, made)
    return made


def _keep(table: dict[tuple[object, ...], T], key: tuple[object, ...], made: T) -> None:
    """Keep an entry. A full table starts again, so that what nobody asks for is freed."""
    if len(table) >= MOST_KEPT:
        table.clear()
    table[key] = made


def holds_no_arrays(method: Method) -> bool:
    """Whether a method is small, so that an entry which holds it costs no memory to speak of."""
    return type(method) in (Amax, FourSix, Sweep) or (type(method) is Optimal and method.weights is None)


def _dtype_of(x: Array) -> str:
    """Short name of an operand's dtype. Raises if this kind of array cannot be quantized as it is."""
    if needs_conversion(x):
        raise NeedsConversion
    if not is_torch(x):
        return dtype_name(to_numpy(x).dtype)
    check_dense(x)
    name = DTYPE_NAMES.get(str(x.dtype).removeprefix("torch."))
    return dtype_name(x.dtype) if name is None else name
