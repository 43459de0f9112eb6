"""The definition: numpy, slow and obvious. Every other backend gives the same bits.

Arrays have the shape (rows, blocks, block): the last axis holds the elements of a block. Arrays with one number per
block have length 1 on that axis.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.headroom import chooser
from halfbyte.backends.protocol import Parts
from halfbyte.backends.reference.four_six import choose_four_six
from halfbyte.backends.reference.headroom import raised_amax
from halfbyte.backends.reference.search import Encode, ScaleGrid, exponent_of, searcher_of
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.codec.blocks import join, split
from halfbyte.codec.element import decode
from halfbyte.codec.pack import pack, unpack
from halfbyte.contracts.arithmetic import (
    block_amax,
    first_scale_byte,
    scale_byte,
    statistics_dtype,
    stored_scale,
    tensor_scale,
)
from halfbyte.contracts.hadamard import rotate
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import DecodeRule, MXRule, NVFP4Rule, Rule, ScaleSearch
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E4M3, E8M0
from halfbyte.methods import Amax, FourSix, Hessian, Method, Optimal
from halfbyte.request import Request


class Reference:
    """The numpy backend."""

    name = "reference"
    takes_tensors = False

    def supports(self, request: Request) -> str | None:
        return None

    def supports_decoding(self, request: Request) -> str | None:
        return None

    def quantize(
        self, x: npt.NDArray[Any], request: Request, amax: F32 | None = None, out: tuple[U8, U8] | None = None
    ) -> Parts[npt.NDArray[Any]]:
        """Quantize a (rows, K) matrix. NaN, Inf and zeros are treated as the contract says; they never raise."""
        transform = request.contract.transform
        if transform.hadamard:
            with np.errstate(over="ignore"):  # exact: the values were rounded to that dtype before
                x = rotate(widen(x), request.dtype, transform.random_signs).astype(x.dtype)
        return quantize_matrix(x, request, amax)

    @np.errstate(all="ignore")
    def dequantize(
        self,
        parts: Parts[npt.NDArray[Any]],
        shape: tuple[int, int],
        request: Request,
        dtype: Any,
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Decode a (rows, K) matrix in the order of the contract's roundings; another dtype costs one more."""
        format, rule = request.format, request.contract.rule(request.format)
        q = decode(unpack(parts.codes, shape[1], format), format.element)
        if not rule.negative_zero:
            q = np.where(q == 0, np.float32(0), q).astype(np.float32)
        q_blocks, bytes_ = split(q, format.block), parts.scales[..., None]
        if isinstance(rule, MXRule | DecodeRule):
            values = rule.decode(q_blocks, bytes_)
        else:
            stored = np.float32(1) if parts.stored_scale is None else parts.stored_scale.reshape(-1, 1, 1)
            top = rule.for_method(request.method).anchor(request.method)
            values = rule.decode(q_blocks, decode(bytes_, E4M3), np.asarray(stored, np.float32), top)
        return join(values, shape).astype(dtype)


@np.errstate(all="ignore")
def quantize_matrix(x: npt.NDArray[Any], request: Request, amax: F32 | None = None) -> Parts[npt.NDArray[Any]]:
    """Quantize a (rows, K) matrix after the contract's Hadamard transform."""
    rule = request.rule
    _check_computed(request.method, rule)
    blocks = split(widen(x), request.format.block, request.tile[0])
    stored: F32 | None = None
    multiplier: F32 | None = None
    if isinstance(rule, NVFP4Rule):
        if amax is None:
            amax = np.abs(blocks).max(axis=(1, 2) if request.scaling == "row" else (0, 1, 2), keepdims=True)
            amax = raised_amax(blocks, amax, chooser(request), x.size)
        codes, scales, stored, multiplier = _quantize_nvfp4(blocks, amax.reshape(-1, 1, 1), rule, request)
    elif isinstance(rule, MXRule):
        codes, scales = _quantize_mx(blocks, rule, request)
    else:
        raise UnsupportedError(f"contract {request.contract.name} decodes {request.format.name} only")
    rows, width = x.shape
    return Parts(
        codes=pack(join(codes, (rows, width)), request.format),
        scales=scales[:rows, :, 0],
        stored_scale=stored,
        global_scale=multiplier,
    )


def _check_computed(method: Method, rule: Rule) -> None:
    """Refuse a method that nothing here computes, instead of the amax method's bytes under another name."""
    by_contract = isinstance(rule, NVFP4Rule) and (
        method in rule.searches or (isinstance(method, FourSix) and rule.four_six is not None)
    )
    if not (by_contract or isinstance(method, Amax) or searcher_of(method) is not None):
        raise UnsupportedError(f"method {method.name} has no entry in SEARCHES (backends/reference/search.py)")


def _quantize_nvfp4(blocks: F32, amax: F32, rule: NVFP4Rule, request: Request) -> tuple[U8, U8, F32 | None, F32]:
    """The six slots in order; a search replaces the amax (slot 2) or tries two scales (4over6)."""
    t = tensor_scale(amax, rule, request.method, request.dtype)
    v = block_amax(blocks, request.tile[0])

    def encode_with(byte: U8) -> U8:
        y = rule.element(blocks, decode(byte, E4M3), t)
        return round_elements(blocks, y, request.format.element, rule.rounding)[0]

    if isinstance(request.method, FourSix) and rule.four_six is not None:
        codes, byte = choose_four_six(blocks, v, t, rule, request)
    else:
        if rule.block_search is not None and request.method in rule.searches:
            v = rule.block_search(blocks, v, t, request.method)
        byte = scale_byte(rule.pre_scale(v, t), rule.scale_byte)
        codes = encode_with(byte)
    stored, multiplier = stored_scale(rule, t)
    search = searcher_of(request.method)
    if search is not None and rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        codes, byte = _search_as_peer(blocks, (codes, byte), rule.scale_search, encode_with, request.method)
    elif search is not None:
        g = multiplier.reshape(-1, 1, 1)
        grid = ScaleGrid(first_scale_byte(rule), E4M3, g, exponent_of(g))
        codes, byte = search(blocks, (codes, byte), grid, encode_with, request.format.element, request.method)
    return codes, byte, stored, multiplier


def _quantize_mx(blocks: F32, rule: MXRule, request: Request) -> tuple[U8, U8]:
    """Power-of-two scales: exponent rule, division, rounding."""
    statistics = statistics_dtype(rule, request.dtype)
    v, element = block_amax(blocks), request.format.element

    def encode_with_scale(scale: F32) -> U8:
        if rule.nearest is not None:
            return rule.nearest(blocks, scale)
        return round_elements(blocks, rule.quotient(blocks, scale, statistics), element, rule.rounding)[0]

    def encode_with(byte: U8) -> U8:
        return encode_with_scale(E8M0.values[byte])

    byte, scale = rule.scale(v, statistics, element)
    codes = encode_with_scale(scale)
    search = searcher_of(request.method)
    if search is not None and rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        codes, byte = _search_as_peer(blocks, (codes, byte), rule.scale_search, encode_with, request.method)
    elif search is not None:
        grid = ScaleGrid(0, E8M0, np.ones((1, 1, 1), np.float32), exponent_of(v))
        codes, byte = search(blocks, (codes, byte), grid, encode_with, element, request.method)
    return codes, byte


def _search_as_peer(
    blocks: F32, start: tuple[U8, U8], search: ScaleSearch, encode_with: Encode, method: Method
) -> tuple[U8, U8]:
    """Codes and bytes of the peer's own search.

    If the search keeps a byte, the codes stay too, because the byte alone cannot show that the scale was NaN.
    """
    codes, byte = start
    chosen = search(blocks, byte, method)
    return np.where(chosen == byte, codes, encode_with(chosen)), chosen
