"""QuantizedTensor: the result of quantize and the input of dequantize."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from halfbyte.arrays import Array, float8_view
from halfbyte.codec.blocks import ceil_div
from halfbyte.codec.pack import packed_width
from halfbyte.contracts import Contract
from halfbyte.errors import InputError
from halfbyte.formats import BlockFormat
from halfbyte.methods import Amax, Method


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """Codes, scales and everything needed to decode them. Plain arrays: no padding, no swizzle, no hidden conversion.

    All arrays are of one kind (numpy or torch) and on one device.
    """

    format: BlockFormat
    shape: tuple[int, ...]
    """Logical shape, elements not bytes."""
    codes: Array
    """uint8, packed: the last axis holds ceil(K/2) bytes, even element in the low nibble (MXFP8: K bytes)."""
    scales: Array
    """uint8 scale codes (raw E4M3 or E8M0), last axis ceil(K/block). The byte of a tile is repeated on its rows."""
    global_scale: Array | None
    """float32 that code times scale is multiplied by: a scalar, or one number per row. None for MX formats."""
    stored_scale: Array | None
    """float32 that the contract itself stores with the blocks (amax, multiplier or encode factor), unchanged."""
    contract: Contract
    """The contract, which defines how the parts are decoded."""
    method: Method = Amax()
    """How the scales were chosen."""

    def __post_init__(self) -> None:
        if not self.shape:
            raise InputError(
                "a QuantizedTensor has at least one axis, the one that is cut into blocks; its shape is ()"
            )
        *leading, width = self.shape
        expected = {
            "codes": (*leading, packed_width(width, self.format)),
            "scales": (*leading, ceil_div(width, self.format.block)),
        }
        for part, wanted in expected.items():
            array = getattr(self, part)
            if tuple(array.shape) != wanted:
                given = tuple(array.shape)
                raise InputError(
                    f"{self.format.name} of shape {self.shape} needs {part} of shape {wanted}, got {given}"
                )
            _check_dtype(part, array, "uint8")
        for part in ("global_scale", "stored_scale"):
            if getattr(self, part) is not None:
                _check_dtype(part, getattr(self, part), "float32")

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
            format=format, shape=shape, codes=codes, scales=scales, global_scale=global_scale,
            stored_scale=stored_scale, contract=contract, method=method,
        )  # fmt: skip
        return made

    @property
    def scales_as_float8(self) -> Array:
        """The scale codes viewed as float8_e4m3fn or float8_e8m0fnu (torch's dtype, or ml_dtypes'); no copy."""
        return float8_view(self.scales, self.format.scale.name)


def _check_dtype(part: str, array: Array, wanted: str) -> None:
    given = array.dtype
    fits = given == wanted if isinstance(given, np.dtype) else str(given) == f"torch.{wanted}"
    if not fits:
        raise InputError(f"{part} must be {wanted}, not {str(given).removeprefix('torch.')}")
