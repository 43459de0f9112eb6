"""Whole calls on the calling thread, by one function of the library. Addresses go in; nothing is looked up or built.

A call that the function does not describe (NaN, Inf, numbers beyond its range) gives False, and the caller takes the
long way, which knows the reference.
"""

from __future__ import annotations

import ctypes

import numpy as np

from halfbyte.backends.cpu.choose import choose, choose_decoder
from halfbyte.backends.cpu.library import choose_isa, native, one_thread
from halfbyte.backends.cpu.recipe import decode_recipe_of, recipe_of
from halfbyte.backends.cpu.structs import DecodeRecipe, Recipe
from halfbyte.backends.protocol import Reason
from halfbyte.codec.bits import DTYPES
from halfbyte.contracts import NVFP4Rule, expressions
from halfbyte.request import Request

WORTH_TABLE = 1 << 20
"""Bytes of decoded values: beyond this, looking for the scales that occur takes longer than a table of all of them."""


class WholeCall:
    """Quantizes contiguous matrices of whole blocks under one request."""

    __slots__ = ("_recipe", "_run", "address", "block", "codes_per_byte", "has_numbers", "library", "one_number",
                 "stores", "threads")  # fmt: skip

    def __init__(self, request: Request, recipe: Recipe) -> None:
        self.library, _ = native()
        self._recipe = recipe
        self.address = ctypes.addressof(recipe)
        self._run = self.library.hb_quantize
        self.block = request.format.block
        self.codes_per_byte = request.format.codes_per_byte
        self.threads = request.threads
        rule = request.rule
        self.has_numbers = isinstance(rule, NVFP4Rule)
        """Whether the call also gives a tensor-level multiplier. MX formats have none."""
        self.stores = isinstance(rule, NVFP4Rule) and rule.stored is not None
        """Whether the contract stores a tensor-level scale."""
        self.one_number = isinstance(rule, NVFP4Rule) and rule.multiplier is expressions.as_stored
        """Whether the stored scale itself is the multiplier of code × scale."""

    def serves(self, size: int) -> bool:
        """Whether an operand of that many bytes is computed by the calling thread alone."""
        return one_thread(size, self.threads)

    def __call__(
        self,
        x: int,
        rows: int,
        width: int,
        amax: float,
        codes: int,
        scales: int,
        stored: int | None,
        multiplier: int | None,
    ) -> bool:
        """Quantize. Arrays are given by their addresses, and an amax of −1 stands for the tensor's own."""
        isa = choose_isa(self.library)
        columns = width // self.block
        return not self._run(self.address, isa, x, rows, columns, amax, codes, scales, stored, multiplier)


class WholeDecode:
    """Decodes contiguous matrices of whole blocks with at most one stored scale."""

    __slots__ = ("_address", "_held", "_library", "_run", "block", "codes_per_byte", "itemsize", "threads")

    def __init__(self, request: Request, dtype: np.dtype[np.generic], recipe: DecodeRecipe) -> None:
        self._library, _ = native()
        self._held = recipe
        self._address = ctypes.addressof(recipe)
        self._run = self._library.hb_dequantize
        self.block = request.format.block
        self.codes_per_byte = request.format.codes_per_byte
        self.itemsize = dtype.itemsize
        self.threads = request.threads

    def serves(self, size: int) -> bool:
        """Whether a result of that many bytes is best computed here: a large one is worth a whole table."""
        return size <= WORTH_TABLE and one_thread(size, self.threads)

    def __call__(self, codes: int, scales: int, blocks: int, stored: int | None, out: int) -> bool:
        """Decode. Arrays are given by their addresses."""
        return not self._run(self._address, choose_isa(self._library), codes, scales, blocks, stored, out)


def whole_call(request: Request) -> WholeCall | None:
    """The whole call that quantizes a request; None if there is none."""
    kernel = choose(request)
    recipe = None if isinstance(kernel, Reason) else recipe_of(request, kernel)
    return None if recipe is None else WholeCall(request, recipe)


def whole_decode(request: Request, dtype: np.dtype[np.generic]) -> WholeDecode | None:
    """The whole call that decodes a request to a dtype; None if there is none."""
    if choose_decoder(request) is not None:
        return None
    name = next(name for name, known in DTYPES.items() if known == dtype)
    recipe = decode_recipe_of(request, name)
    return None if recipe is None else WholeDecode(request, dtype, recipe)
