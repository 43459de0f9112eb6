"""QuantizedTensor: the result of quantize and the input of dequantize."""

from __future__ import annotations

import operator
import sys
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

import numpy as np

from halfbyte.arrays import Array, device_of, float8_view, is_dtype, is_torch, like, to_numpy
from halfbyte.contracts import Contract, NVFP4Rule, get_contract
from halfbyte.errors import InputError, RowIndexError, UnsupportedError
from halfbyte.formats import BlockFormat, get_format
from halfbyte.methods import Amax, Method, method_from
from halfbyte.tensor_parts import as_codes, as_float32, as_scales, as_shape

if TYPE_CHECKING:
    import torch

AMAX = Amax()


@dataclass(frozen=True, eq=False, init=False, repr=False)
class QuantizedTensor:
    """Codes, scales and everything needed to decode them. Plain arrays: no padding, no swizzle, no hidden conversion.

    `quantize` makes one; you can also make one from bytes that you have. All arrays are of one kind (numpy or torch)
    and on one device. Blocks run along the last axis.

    format: a BlockFormat or a name: "nvfp4", "mxfp4" or "mxfp8".
    shape: the logical shape, in elements: (..., K).
    codes: uint8 (..., ceil(K/2)), even element in the low nibble (MXFP8: (..., K)). Views as torch.float4_e2m1fn_x2 or
        float8_e4m3fn are taken as their bytes. ml_dtypes' float4_e2m1fn (..., K) is packed into a copy.
    scales: uint8 (..., ceil(K/block)), raw E4M3 or E8M0; views as float8_e4m3fn or float8_e8m0fnu are taken too.
    global_scale: leave it out: it follows from stored_scale. One that contradicts stored_scale raises (on a GPU it is
        not compared, since that would wait, and the derived number is used). Without a stored_scale it is taken if
        the contract stores the multiplier itself.
    stored_scale: the float32 that the contract stores: a number, or an array of shape () for the tensor, (n,) for one
        per index of the first axis, or (...) for one per row. None for formats and contracts without one.
    contract: a Contract or its name. It says how the parts are decoded. None: "ocp", for formats without a tensor
        scale; a format with one needs a contract, because projects store different numbers.
    method: how the scales were chosen; a Method or its spelling. None: amax.

    `==` is True if two tensors have the same format, shape and bytes, and their contracts decode them alike; where the
    arrays are (numpy or torch, CPU or GPU) does not count. The hash is that of format and shape.

    >>> import torch
    >>> codes, scales = torch.full((2, 16), 0x22, dtype=torch.uint8), torch.full((2, 1), 128, dtype=torch.uint8)
    >>> q = QuantizedTensor("mxfp4", (2, 32), codes, scales)
    >>> q
    QuantizedTensor(mxfp4, shape=(2, 32), contract=ocp(), method=amax, torch on cpu, 34 bytes)
    >>> q.dequantize()[0, :3]
    tensor([2., 2., 2.])
    >>> q[0].shape, q[:1] == q, q == q.to("numpy")
    ((32,), False, True)
    """

    format: BlockFormat
    shape: tuple[int, ...]
    """Logical shape, elements not bytes."""
    codes: Array
    """uint8, packed: the last axis holds ceil(K/2) bytes, even element in the low nibble (MXFP8: K bytes)."""
    scales: Array
    """uint8 scale codes (raw E4M3 or E8M0), last axis ceil(K/block). The byte of a tile is repeated on its rows."""
    stored_scale: Array | None
    """float32 that the contract itself stores with the blocks (amax, multiplier or encode factor), unchanged: a scalar,
    one number per index of the first axis, or one per row. None where the contract stores nothing."""
    contract: Contract
    """The contract, which defines how the parts are decoded."""
    method: Method
    """How the scales were chosen."""

    def __init__(
        self,
        format: str | BlockFormat,
        shape: tuple[int, ...],
        codes: Array,
        scales: Array,
        global_scale: Array | float | None = None,
        stored_scale: Array | float | None = None,
        contract: str | Contract | None = None,
        method: str | Method | None = None,
    ) -> None:
        block_format = get_format(format)
        shape = as_shape(shape)
        if contract is None and block_format.has_global:
            raise InputError(
                f"a QuantizedTensor of {block_format.name} needs a contract, which says what stored_scale means: "
                'contract="modelopt" if it multiplies, "compressed_tensors" if it divides, "transformer_engine" if it '
                "is the amax"
            )
        put = object.__setattr__
        put(self, "format", block_format)
        put(self, "shape", shape)
        put(self, "codes", as_codes(codes, shape, block_format))
        put(self, "scales", as_scales(scales, shape, block_format))
        if is_torch(self.codes) != is_torch(self.scales):
            raise InputError(
                f"codes are {_kind(self.codes)} and scales {_kind(self.scales)}; give both as numpy arrays or both as "
                "torch tensors"
            )
        put(self, "stored_scale", as_float32("stored_scale", stored_scale, shape, self.codes))
        put(self, "contract", get_contract(contract, block_format))
        rule = self.contract.rules.get(block_format.name)
        if stored_scale is not None and rule is not None and not (isinstance(rule, NVFP4Rule) and rule.stored):
            raise InputError(
                f"contract {self.contract} stores no scale with {block_format.name}; leave stored_scale out"
            )
        put(self, "method", AMAX if method is None else method_from(method))
        if global_scale is not None:
            self._take(as_float32("global_scale", global_scale, shape, self.codes))

    @classmethod
    def trusted(
        cls,
        format: BlockFormat,
        shape: tuple[int, ...],
        codes: Array,
        scales: Array,
        global_scale: Array | None,
        stored_scale: Array | None,
        contract: Contract,
        method: Method,
    ) -> QuantizedTensor:
        """A tensor of parts that halfbyte itself has just made: nothing is checked again."""
        made = cls.__new__(cls)
        made.__dict__.update(
            format=format, shape=shape, codes=codes, scales=scales, _multiplier=global_scale,
            stored_scale=stored_scale, contract=contract, method=method,
        )  # fmt: skip
        return made

    # --- the tensor scale ---

    @property
    def global_scale(self) -> Array | None:
        """float32 that code times scale is multiplied by, in the shape of stored_scale. None for MX formats.

        It follows from `stored_scale` by the contract's formula. For a tensor on a GPU that quantize has not made
        itself, the first use copies the stored scale to the host.
        """
        known: Array | None = self.__dict__.get("_multiplier")
        if known is None:
            known = self._derived()
            object.__setattr__(self, "_multiplier", known)
        return known

    def _derived(self) -> Array | None:
        rule = self.contract.rules.get(self.format.name)
        if not isinstance(rule, NVFP4Rule):
            return None
        rule = rule.for_method(self.method)
        if rule.stored is None:
            return like(np.ones((), np.float32), self.codes)
        if self.stored_scale is None:
            raise InputError(missing_scale(self))
        stored = to_numpy(self.stored_scale) if is_torch(self.stored_scale) else np.asarray(self.stored_scale)
        with np.errstate(all="ignore"):
            multiplier = rule.multiplier(stored.reshape(-1), rule.anchor(self.method))
        return like(np.asarray(multiplier, np.float32).reshape(stored.shape), self.codes)

    def _take(self, given: Array | None) -> None:
        """Check a global scale that the caller gave against the stored scale; or let it be the stored scale."""
        rule = self.contract.rules.get(self.format.name)
        if given is None:
            return
        if not isinstance(rule, NVFP4Rule):
            raise InputError(f"{self.format.name} under contract {self.contract} has no global scale; leave it out")
        rule = rule.for_method(self.method)
        if self.stored_scale is None and rule.stored is not None:
            if rule.stored_as != "multiplier":
                raise InputError(
                    f"contract {self.contract.name} stores the {rule.stored_as}, not the global scale; give it as "
                    "stored_scale and leave global_scale out"
                )
            object.__setattr__(self, "stored_scale", given)
            return
        if is_torch(given) and given.device.type != "cpu":
            return
        derived, wanted = to_numpy(np.asarray(given) if not is_torch(given) else given), self._derived()
        expected = np.broadcast_to(np.asarray(wanted), derived.shape) if wanted is not None else derived
        if not np.array_equal(derived, expected, equal_nan=True):
            raise InputError(
                f"global_scale {derived.reshape(-1)[0]:.9g} contradicts stored_scale: contract {self.contract.name} "
                f"derives {np.asarray(expected).reshape(-1)[0]:.9g} from it; leave global_scale out"
            )

    # --- facts ---

    @property
    def scales_as_float8(self) -> Array:
        """The scale codes viewed as float8_e4m3fn or float8_e8m0fnu (torch's dtype, or ml_dtypes'); no copy."""
        return float8_view(self.scales, self.format.scale.name)

    @property
    def device(self) -> torch.device | str:
        """Where the codes are: a torch device, or "numpy"."""
        return self.codes.device if is_torch(self.codes) else "numpy"

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and stored scale."""
        parts = (self.codes, self.scales, self.stored_scale)
        return sum(int(part.nbytes) for part in parts if part is not None)

    def __repr__(self) -> str:
        place = f"torch on {self.device}" if is_torch(self.codes) else "numpy"
        return (
            f"QuantizedTensor({self.format.name}, shape={self.shape}, contract={self.contract}, "
            f"method={self.method.spelling}, {place}, {self.nbytes} bytes)"
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, QuantizedTensor):
            return NotImplemented
        if self is other:
            return True
        if (self.format, self.shape) != (other.format, other.shape) or not _decode_alike(self, other):
            return False
        return all(_same(getattr(self, part), getattr(other, part)) for part in ("codes", "scales", "stored_scale"))

    def __hash__(self) -> int:
        return hash((self.format, self.shape))

    # --- acts ---

    def dequantize(
        self, dtype: object = "float32", backend: str = "auto", threads: int | None = None, out: Array | None = None
    ) -> Array:
        """Decode: what `halfbyte.dequantize` gives for this tensor; see there."""
        decoded: Array = _package().dequantize(self, dtype, backend, threads, out)
        return decoded

    def error(self, x: Array) -> Any:
        """How far the decoded values are from x: what `halfbyte.error` gives; see there."""
        return _package().error(self, x)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The tensor on a device: every part is moved, as torch tensors; "numpy" gives numpy arrays.

        Arrays that are there already are shared, not copied.

        >>> import torch
        >>> q = QuantizedTensor("mxfp4", (32,), np.zeros(16, np.uint8), np.zeros(1, np.uint8))
        >>> q.device, q.to("cpu").device, type(q.to("cpu").codes).__name__
        ('numpy', device(type='cpu'), 'Tensor')
        """

        def moved(part: Array | None) -> Any:
            if part is None:
                return None
            if device == "numpy":
                return to_numpy(part) if is_torch(part) else np.asarray(part)
            import torch

            if not is_torch(part):
                array = np.asarray(part)
                array = array if array.flags.writeable and array.flags.c_contiguous else array.copy()
                part = torch.from_numpy(array)
            return part.to(device)

        if not (isinstance(device, str) and device == "numpy"):
            if is_dtype(device):
                raise InputError(
                    f"to() moves the bytes to a device or to 'numpy', not to {device}; dequantize({device}) gives "
                    "values of that dtype"
                )
            device = device_of(device, "to()")
        known: Array | None = self.__dict__.get("_multiplier")
        return QuantizedTensor.trusted(
            self.format, self.shape, moved(self.codes), moved(self.scales), moved(known), moved(self.stored_scale),
            self.contract, self.method,
        )  # fmt: skip

    def __getitem__(self, index: Any) -> QuantizedTensor:
        """Some rows: integers and slices on the axes before the last. The result shares this tensor's memory.

        The last axis is cut into blocks and stays whole.

        >>> q = QuantizedTensor("mxfp4", (6, 4, 32), np.zeros((6, 4, 16), np.uint8), np.zeros((6, 4, 1), np.uint8))
        >>> q[2:5].shape, q[1].shape, q[:, 0].shape
        ((3, 4, 32), (4, 32), (6, 32))
        """
        at = _leading_index(index, self.shape)
        leading = self.shape[:-1]
        for axis, one in enumerate(at):
            if isinstance(one, int) and not -leading[axis] <= one < leading[axis]:
                raise RowIndexError(f"index {one} on shape {self.shape}: axis {axis} has {leading[axis]}")

        def number(value: Array | None) -> Array | None:
            if value is None or not value.shape or tuple(value.shape) not in (leading, leading[:1]):
                return value
            found = value[at[: len(value.shape)]]
            return found if is_torch(found) else np.asarray(found)

        codes = self.codes[at]
        return QuantizedTensor.trusted(
            self.format, (*tuple(codes.shape)[:-1], self.shape[-1]), codes, self.scales[at],
            number(self.__dict__.get("_multiplier")), number(self.stored_scale), self.contract, self.method,
        )  # fmt: skip

    def swizzled_scales(self) -> Array:
        """The scale bytes in the 128x4 tiles that Blackwell's matrix units read, padded with zeros to whole tiles.

        The result is uint8, flat for a matrix; (..., bytes of one matrix) if there are axes before the rows.
        `halfbyte.layouts.swizzle` has the order of the bytes, and the way back.

        >>> import torch
        >>> q = QuantizedTensor("mxfp4", (3, 130, 32), torch.zeros(3, 130, 16, dtype=torch.uint8),
        ...                     torch.ones(3, 130, 1, dtype=torch.uint8))
        >>> q.swizzled_scales().shape
        torch.Size([3, 1024])
        """
        scales = self.scales if len(self.shape) > 1 else self.scales[None]
        swizzled: Array = _package().layouts.swizzle.swizzle(scales)
        return swizzled

    def save(self, path: str | PathLike[str]) -> None:
        """Write a safetensors file that `halfbyte.load` reads back; see there for its tensors and metadata."""
        _package().saved.save(self, path)


def missing_scale(q: QuantizedTensor) -> str:
    """What to say of a tensor whose contract needs a stored scale that is not there."""
    rule = q.contract.rules.get(q.format.name)
    word = f" (it is the {rule.for_method(q.method).stored_as})" if isinstance(rule, NVFP4Rule) else ""
    return (
        f"contract {q.contract.name} decodes {q.format.name} with a stored scale, and the tensor has none{word}; its "
        f"shape is {q.shape}; give stored_scale"
    )


def _package() -> Any:
    """The package, whose functions take these tensors. They are to the right of this module and loaded when used."""
    return sys.modules["halfbyte"]


def _kind(array: Array) -> str:
    return "a torch tensor" if is_torch(array) else "a numpy array"


def _leading_index(index: Any, shape: tuple[int, ...]) -> tuple[int | slice, ...]:
    """An index of the leading axes as a tuple of integers and slices."""
    given = index if isinstance(index, tuple) else (index,)
    ellipses = [at for at, one in enumerate(given) if one is Ellipsis]  # arrays are not compared
    if ellipses:
        if len(ellipses) > 1:
            raise InputError(f"index {index!r}: only one ... is possible")
        (at,) = ellipses
        given = (*given[:at], *(slice(None),) * (len(shape) - len(given) + 1), *given[at + 1 :])
    if len(given) == len(shape) and isinstance(given[-1], slice) and given[-1] == slice(None):
        given = given[:-1]
    if len(given) >= len(shape):
        rows = len(shape) - 1
        axes = {0: "", 1: "index the axis before it, or "}.get(rows, f"index the {rows} axes before it, or ")
        only = "only" if rows == 0 else "last"
        raise InputError(
            f"index {index!r} on shape {shape}: the {only} axis is cut into blocks and stays whole; "
            f"{axes}dequantize first"
        )
    for one in given:
        parts = [one.start, one.stop, one.step] if isinstance(one, slice) else [one]
        whole = [_whole_number(part) for part in parts if part is not None or not isinstance(one, slice)]
        if None in whole:
            raise UnsupportedError(f"index {index!r}: rows are taken by integers and slices, not {type(one).__name__}")
        if isinstance(one, slice) and one.step is not None and one.step < 1:
            raise InputError(f"index {index!r}: a step must be positive")
    return tuple(one if isinstance(one, slice) else one.__index__() for one in given)


def _whole_number(value: Any) -> int | None:
    """An integer, of numpy and torch too; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except (TypeError, RuntimeError):
        return None


def _decode_alike(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether two tensors with the same bytes have the same values by definition."""
    mine, others = a.contract.rules.get(a.format.name), b.contract.rules.get(b.format.name)
    if isinstance(mine, NVFP4Rule) and isinstance(others, NVFP4Rule):
        mine, others = mine.for_method(a.method), others.for_method(b.method)
        if mine.stored is not None and mine.anchor(a.method) != others.anchor(b.method):
            return mine.multiplier is others.multiplier and mine.stored_as != "amax" and mine.decode is others.decode
    if mine is None or others is None or mine.negative_zero != others.negative_zero:
        return False
    return type(mine) is type(others) and mine.decode == others.decode


def _same(a: Array | None, b: Array | None) -> bool:
    """Whether two arrays have the same bytes."""
    if a is None or b is None:
        return a is b
    mine, others = np.asarray(to_numpy(a) if is_torch(a) else a), np.asarray(to_numpy(b) if is_torch(b) else b)
    return mine.shape == others.shape and mine.tobytes() == others.tobytes()
