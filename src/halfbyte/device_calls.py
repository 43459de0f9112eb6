"""Calls on CUDA tensors: what does not depend on the data is found once. A call looks it up, allocates and launches.

`quantize` and `dequantize` come here first with tensors on a card. What is unusual (memory that is not contiguous or
not aligned, lengths that need padding, transforms, methods that hold arrays) goes the general way (`on_device.py`),
which gives the same bits. Nothing waits for the device.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple, TypeGuard

from halfbyte.arrays import DTYPE_NAMES, output_dtype
from halfbyte.backends import choose_backend
from halfbyte.backends.gpu import Bound, DecodingCalls, Gpu, QuantizingCalls, float32_bits
from halfbyte.codec.bits import DTYPES, FLOAT32_MAX
from halfbyte.contracts import CONTRACTS, NVFP4Rule
from halfbyte.formats import FORMATS
from halfbyte.methods import METHODS
from halfbyte.prepared import holds_no_arrays
from halfbyte.request import Request, check_shape, resolve, resolve_decoding, stores_scale
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch

LARGEST = float(FLOAT32_MAX)
MOST_KEPT = 512
MOST_SHAPES = 256
ONE = (1,)


def is_on_card(x: object) -> TypeGuard[torch.Tensor]:
    """Whether x is a CUDA tensor."""
    return getattr(x, "is_cuda", False)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Those of contiguous memory."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


class QuantizingShape(NamedTuple):
    """What is known of a shape."""

    rows: int
    shape: tuple[int, ...]
    codes: tuple[tuple[int, ...], tuple[int, ...]]
    """Shape and strides: with both given, memory is allocated fastest."""
    scales: tuple[tuple[int, ...], tuple[int, ...]]
    code_bytes: int
    scale_bytes: int


class Quantizer:
    """Quantizes tensors of one dtype on one device, for one set of arguments."""

    def __init__(self, request: Request, device: torch.device, held: tuple[object, ...]) -> None:
        import torch

        self.request, self.device, self.held = request, device, held
        self.rule = request.contract.rule(request.format)
        self.calls = QuantizingCalls(request, device)
        self.by_row = request.scaling == "row"
        rule = self.rule
        self.takes_amax = isinstance(rule, NVFP4Rule) and rule.stored is not None and rule.constant_factor is None
        self.shapes: dict[tuple[int, ...], QuantizingShape | None] = {}
        self._empty, self._bytes, self._floats = torch.empty_strided, torch.uint8, torch.float32

    def is_current(self) -> bool:
        """Whether the contract's table of rules, which may be changed, is what it was."""
        return self.request.contract.rules.get(self.request.format.name) is self.rule

    def __call__(self, x: torch.Tensor, global_amax: Any, out: QuantizedTensor | None) -> QuantizedTensor | None:
        """The quantized tensor; None: the general way has to take this call."""
        shape = x.shape
        known = self.shapes.get(shape, self)
        if known is self:
            known = self._learn(tuple(shape))
        pointer = x.data_ptr()
        if not isinstance(known, QuantizingShape) or pointer & 15 or not x.is_contiguous():
            return None
        whose, given = "own", 0
        if global_amax is not None:
            if not self.takes_amax:
                return None
            if type(global_amax) is float and not self.by_row and 0 <= global_amax <= LARGEST:
                whose, given = "value", float32_bits(global_amax + 0.0 if global_amax else 0.0)
            elif self._is_amax(global_amax, known.rows):
                whose, given = "tensor", global_amax.data_ptr()
            else:
                return None
        bound = self.calls.bound(known.rows, shape[-1], whose)
        empty, device = self._empty, self.device
        if out is None:
            codes = empty(*known.codes, dtype=self._bytes, device=device)
            scales = empty(*known.scales, dtype=self._bytes, device=device)
        elif self._fits(out, x, pointer, known):
            codes, scales = out.codes, out.scales  # type: ignore[assignment]  # _fits has seen that they are tensors
        else:
            return None
        small = tables = None
        small_pointer = table_pointer = 0
        if bound.small_floats:
            small = empty((bound.small_floats,), ONE, dtype=self._floats, device=device)
            small_pointer = small.data_ptr()
        if bound.table_bytes:
            tables = empty((bound.table_bytes,), ONE, dtype=self._bytes, device=device)
            table_pointer = tables.data_ptr()
        bound.launch(pointer, codes.data_ptr(), scales.data_ptr(), small_pointer, given, table_pointer)
        multiplier, stored = self._numbers(small, bound, known)
        request = self.request
        return QuantizedTensor.trusted(
            request.format, known.shape, codes, scales, multiplier, stored, request.contract, request.method
        )

    def _numbers(
        self, small: torch.Tensor | None, bound: Bound, known: QuantizingShape
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Multiplier and stored scale, of the tensor or of each row."""
        if small is None:
            return None, None
        if not self.by_row:
            return small[bound.multiplier], None if bound.stored < 0 else small[bound.stored]
        rows, leading = known.rows, known.shape[:-1]
        multiplier = small[bound.multiplier : bound.multiplier + rows].view(leading)
        return multiplier, None if bound.stored < 0 else small[bound.stored : bound.stored + rows].view(leading)

    def _learn(self, shape: tuple[int, ...]) -> QuantizingShape | None:
        """What a shape means; None for one that the general way has to take. Raises for one that cannot be taken."""
        request, block = self.request, self.request.format.block
        logical = check_shape(request, shape)
        known = None
        if shape[-1] % block == 0 and 0 not in shape and self.calls.usual:
            *leading, width = shape
            code_width, columns = width // request.format.codes_per_byte, width // block
            rows = math.prod(leading)
            codes, scales = (*leading, code_width), (*leading, columns)
            known = QuantizingShape(
                rows, logical, (codes, strides(codes)), (scales, strides(scales)), rows * code_width, rows * columns
            )
        if len(self.shapes) >= MOST_SHAPES:
            self.shapes.clear()
        self.shapes[shape] = known
        return known

    def _is_amax(self, given: Any, rows: int) -> bool:
        """Whether a tensor can be read as it is."""
        return (
            type(given) is self.calls.tensor_type
            and given.dtype is self._floats
            and given.device == self.device
            and given.numel() == (rows if self.by_row else 1)
            and given.is_contiguous()
        )

    def _fits(self, out: QuantizedTensor, x: torch.Tensor, pointer: int, known: QuantizingShape) -> bool:
        """Whether `out` can be written into; where not, the general way says why."""
        if type(out) is not QuantizedTensor or out.shape != known.shape or out.format != self.request.format:
            return False
        codes, scales, wanted = out.codes, out.scales, self.calls.tensor_type
        if type(codes) is not wanted or type(scales) is not wanted:
            return False
        if codes.device != self.device or scales.device != self.device:
            return False
        if not (codes.is_contiguous() and scales.is_contiguous()):
            return False
        first, second, stop = codes.data_ptr(), scales.data_ptr(), pointer + x.nbytes
        apart = first + known.code_bytes <= second or second + known.scale_bytes <= first
        return (
            apart
            and first % 16 == 0
            and (first + known.code_bytes <= pointer or stop <= first)
            and (second + known.scale_bytes <= pointer or stop <= second)
        )


_QUANTIZERS: dict[tuple[object, ...], Quantizer | None] = {}


def quantize_on_card(
    x: torch.Tensor,
    format: Any,
    contract: Any,
    method: Any,
    block: Any,
    tile: Any,
    scaling: Any,
    global_amax: Any,
    backend: Any,
    threads: Any,
    out: Any,
) -> QuantizedTensor | None:
    """What `quantize` returns for a CUDA tensor; None: the general way has to take this call."""
    named_format = FORMATS.get(format, format) if type(format) is str else format
    named_contract = CONTRACTS.get(contract, contract) if type(contract) is str else contract
    named_method = METHODS.get(method, method) if type(method) is str else method
    options = None if block is tile is scaling is threads is None else repr((block, tile, scaling, threads))
    key = (
        type(x), id(named_format), id(named_contract), named_method, options, backend, x.dtype, x.device, x.layout,
    )  # fmt: skip
    try:
        found = _QUANTIZERS[key]
    except TypeError:  # an argument that cannot be hashed
        return None
    except KeyError:
        request = _served(x, format, contract, method, block, tile, scaling, backend, threads)
        if request is not None and not holds_no_arrays(request.method):
            return None  # an entry would keep the method's arrays
        held = (named_format, named_contract)
        found = None if request is None else Quantizer(request, x.device, held)
        _keep(_QUANTIZERS, key, found)
    if found is None or not found.is_current():
        return None
    return found(x, global_amax, out)


def _served(
    x: torch.Tensor, format: Any, contract: Any, method: Any, block: Any, tile: Any, scaling: Any, backend: Any,
    threads: Any,
) -> Request | None:  # fmt: skip
    """The request, if this backend serves it and the operand is an ordinary tensor."""
    import torch

    name = DTYPE_NAMES.get(str(x.dtype).removeprefix("torch."))
    ordinary = type(x) in (torch.Tensor, torch.nn.Parameter) and x.layout == torch.strided
    if name is None or not ordinary or not (threads is None or type(threads) is int):
        return None
    request = resolve(
        format, contract, method, block=block, tile=tile, scaling=scaling, dtype=name, threads=threads, device="cuda"
    )
    return request if isinstance(choose_backend(backend, request), Gpu) else None


# --- decoding ---


class Decoder:
    """Decodes tensors of one format and contract on one device to one dtype."""

    def __init__(self, request: Request, dtype: str, device: torch.device, held: tuple[object, ...]) -> None:
        import torch

        self.request, self.device, self.index, self.held = request, device, device.index, held
        self.rule = request.contract.rule(request.format)
        self.needs_stored = stores_scale(self.rule)
        self.calls = DecodingCalls(request, dtype, device)
        self.dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[dtype]
        self._empty = torch.empty_strided
        self._strides: dict[tuple[int, ...], tuple[int, ...]] = {}

    def is_current(self) -> bool:
        return self.request.contract.rules.get(self.request.format.name) is self.rule

    def __call__(self, q: QuantizedTensor, out: Any) -> torch.Tensor | None:
        """The values; None: the general way has to take this call."""
        codes: Any = q.codes
        scales: Any = q.scales
        stored: Any = q.stored_scale
        shape, wanted = q.shape, self.calls.tensor_type
        index = self.index
        if type(codes) is not wanted or type(scales) is not wanted or scales.get_device() != index:
            return None
        if 0 in shape or shape[-1] % self.request.format.block:
            return None
        if not (codes.is_contiguous() and scales.is_contiguous()):
            return None
        first, count, given = codes.data_ptr(), 0, 0
        if first & 15 or (stored is None and self.needs_stored):
            return None
        rows = codes.numel() // codes.shape[-1]
        if rows == 0:
            return None
        if stored is not None and self.calls.reads_stored:
            count = stored.numel()
            usual = type(stored) is wanted and stored.get_device() == index and stored.is_contiguous()
            if not usual or count not in (1, rows):
                return None
            given = stored.data_ptr()
        bound = self.calls.bound(rows, shape[-1], count)
        if out is None:
            steps = self._strides.get(shape) or self._learn(shape)
            values = self._empty(shape, steps, dtype=self.dtype, device=self.device)
        elif self._fits(out, q, first, scales):
            values = out
        else:
            return None
        bound.launch(values.data_ptr(), first, scales.data_ptr(), 0, given, 0)
        return values

    def _learn(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        if len(self._strides) >= MOST_SHAPES:
            self._strides.clear()
        self._strides[shape] = found = strides(shape)
        return found

    def _fits(self, out: Any, q: QuantizedTensor, first: int, scales: torch.Tensor) -> bool:
        if type(out) is not self.calls.tensor_type or tuple(out.shape) != q.shape or out.dtype is not self.dtype:
            return False
        if out.device != self.device or not out.is_contiguous() or out.data_ptr() & 15:
            return False
        start, stop = out.data_ptr(), out.data_ptr() + out.nbytes
        parts = ((first, q.codes.nbytes), (scales.data_ptr(), scales.nbytes))
        return all(stop <= part or part + size <= start for part, size in parts)


_DECODERS: dict[tuple[object, ...], Decoder | None] = {}


def dequantize_on_card(q: QuantizedTensor, dtype: Any, backend: Any, threads: Any, out: Any) -> torch.Tensor | None:
    """What `dequantize` returns for a CUDA tensor; None: the general way has to take this call."""
    format, contract, method = q.format, q.contract, q.method
    device: Any = q.codes.device
    key = (id(format), id(contract), method, dtype, backend, threads is None, device)
    try:
        found = _DECODERS[key]
    except TypeError:
        return None
    except KeyError:
        if threads is not None or not holds_no_arrays(method):
            return None
        request = resolve_decoding(format, contract, method, None, "cuda")
        name = next(name for name, known in DTYPES.items() if known == output_dtype(dtype))
        serves = isinstance(choose_backend(backend, request, decoding=True), Gpu)
        found = Decoder(request, name, device, (format, contract)) if serves else None
        _keep(_DECODERS, key, found)
    if found is None or not found.is_current():
        return None
    return found(q, out)


def _keep(table: dict[Any, Any], key: object, made: object) -> None:
    """Keep an entry. A full table starts again."""
    if len(table) >= MOST_KEPT:
        table.clear()
    table[key] = made
