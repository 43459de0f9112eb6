"""The definition: numpy, slow and obvious. Every other backend equals it bit for bit.

Arrays run as (rows, blocks, block): a block's elements lie along the last axis, per-block numbers have length 1 there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.protocol import Parts, Request
from halfbyte.backends.reference.four_six import choose_four_six
from halfbyte.backends.reference.search import Encode, exponent_of, search_scales
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.codec.blocks import join, over_tiles, repeat_rows, split
from halfbyte.codec.element import decode, encode
from halfbyte.codec.pack import pack, unpack
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import DecodeRule, MXRule, NVFP4Rule, ScaleByte, ScaleSearch, TensorScale
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E4M3, E8M0
from halfbyte.methods import FourSix, Hessian, Method, Optimal


class Reference:
    """The numpy backend."""

    name = "reference"

    def supports(self, request: Request) -> str | None:
        return None

    def supports_decoding(self, request: Request) -> str | None:
        return None

    @np.errstate(all="ignore")
    def quantize(self, x: npt.NDArray[np.generic], request: Request) -> Parts:
        """Quantize a (rows, K) matrix. NaN, Inf and zeros do what the contract says; nothing raises here."""
        rule = request.contract.rule(request.format)
        blocks = split(widen(x), request.format.block, request.tile[0])
        stored: F32 | None = None
        multiplier: F32 | None = None
        if isinstance(rule, NVFP4Rule):
            codes, scales, stored, multiplier = _quantize_nvfp4(blocks, rule.for_method(request.method), request)
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

    @np.errstate(all="ignore")
    def dequantize(
        self,
        codes: U8,
        scales: U8,
        stored_scale: F32 | None,
        shape: tuple[int, int],
        request: Request,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Decode a (rows, K) matrix in the order of the contract's roundings; another dtype costs one more."""
        format, rule = request.format, request.contract.rule(request.format)
        q = decode(unpack(codes, shape[1], format), format.element)
        if not rule.negative_zero:
            q = np.where(q == 0, np.float32(0), q).astype(np.float32)
        q_blocks, bytes_ = split(q, format.block), scales[..., None]
        if isinstance(rule, MXRule | DecodeRule):
            values = rule.decode(q_blocks, bytes_)
        else:
            stored = np.float32(1) if stored_scale is None else stored_scale.reshape(-1, 1, 1)
            top = rule.for_method(request.method).anchor(request.method)
            values = rule.decode(q_blocks, decode(bytes_, E4M3), np.asarray(stored, np.float32), top)
        return join(values, shape).astype(dtype)


def block_amax(blocks: F32, tile_rows: int = 1) -> F32:
    """Largest magnitude of each block, or of each tile repeated on its rows: (rows, blocks, 1). NaN wins."""
    if tile_rows == 1:
        return np.asarray(np.abs(blocks).max(axis=-1, keepdims=True))
    return repeat_rows(np.abs(over_tiles(blocks, tile_rows)).max(axis=(-2, -1)), tile_rows)


def tensor_scale(blocks: F32, rule: NVFP4Rule, request: Request) -> TensorScale:
    """Slot 1: the tensor-level numbers, one for the tensor or one a row."""
    if request.global_amax is not None:
        amax = request.global_amax.reshape(-1, 1, 1)
    elif request.scaling == "row":
        amax = np.abs(blocks).max(axis=(1, 2), keepdims=True)
    else:
        amax = np.abs(blocks).max(axis=(0, 1, 2), keepdims=True)
    amax = np.where(np.isnan(amax), np.float32(np.nan), amax).astype(np.float32)  # one NaN, whatever its payload was
    statistics = request.dtype if rule.statistics == "input" else "fp32"
    top = rule.anchor(request.method)
    factor = (
        rule.factor(amax, top, statistics) if rule.constant_factor is None else np.full_like(amax, rule.constant_factor)
    )
    return TensorScale(amax, factor, np.float32(rule.element_max), top, statistics)


def scale_byte(pre_scale: F32, policy: ScaleByte) -> U8:
    """Slot 3: a block scale as an E4M3 byte; NaN is 0x7F."""
    if policy.for_zero is not None:
        pre_scale = np.where(pre_scale == 0, np.float32(policy.for_zero), pre_scale).astype(np.float32)
    byte = encode(np.maximum(pre_scale, np.float32(policy.smallest)), E4M3) & 0x7F
    if policy.for_zero_byte is not None:
        byte = np.where(byte == 0, policy.for_zero_byte, byte)
    return byte.astype(np.uint8)


def _quantize_nvfp4(blocks: F32, rule: NVFP4Rule, request: Request) -> tuple[U8, U8, F32 | None, F32]:
    """The six slots in order; a search replaces the amax (slot 2) or tries two scales (4over6)."""
    t = tensor_scale(blocks, rule, request)
    v = block_amax(blocks, request.tile[0])

    def encode_with(byte: U8) -> U8:
        y = rule.element(blocks, decode(byte, E4M3), t)
        return round_elements(blocks, y, request.format.element, rule.rounding)[0]

    if isinstance(request.method, FourSix) and rule.four_six is not None:
        codes, byte = choose_four_six(blocks, v, t, rule, request, scale_byte)
    else:
        if rule.block_search is not None and request.method in rule.searches:
            v = rule.block_search(blocks, v, t, request.method)
        byte = scale_byte(rule.pre_scale(v, t), rule.scale_byte)
        codes = encode_with(byte)
    stored = None if rule.stored is None else rule.stored(t).reshape(-1)
    multiplier = np.ones(1, np.float32) if stored is None else rule.multiplier(stored, t.top)
    if rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        codes, byte = _search_as_peer(blocks, (codes, byte), rule.scale_search, encode_with, request.method)
    elif isinstance(request.method, Optimal | Hessian):
        g = multiplier.reshape(-1, 1, 1)
        smallest = int(np.searchsorted(E4M3.magnitudes, max(rule.scale_byte.smallest, E4M3.smallest)))
        candidates = range(smallest, E4M3.magnitudes.size)
        codes, byte = search_scales(
            blocks, (codes, byte), candidates, encode_with, E4M3.values, g, exponent_of(g), request.format.element,
            request.method,
        )  # fmt: skip
    return codes, byte, stored, multiplier


def _quantize_mx(blocks: F32, rule: MXRule, request: Request) -> tuple[U8, U8]:
    """Power-of-two scales: exponent rule, division, rounding."""
    statistics = request.dtype if rule.statistics == "input" else "fp32"
    v, element = block_amax(blocks), request.format.element

    def encode_with_scale(scale: F32) -> U8:
        if rule.nearest is not None:
            return rule.nearest(blocks, scale)
        return round_elements(blocks, rule.quotient(blocks, scale, statistics), element, rule.rounding)[0]

    def encode_with(byte: U8) -> U8:
        return encode_with_scale(E8M0.values[byte])

    byte, scale = rule.scale(v, statistics, element)
    codes = encode_with_scale(scale)
    if rule.scale_search is not None and isinstance(request.method, Optimal | Hessian):
        codes, byte = _search_as_peer(blocks, (codes, byte), rule.scale_search, encode_with, request.method)
    elif isinstance(request.method, Optimal | Hessian):
        codes, byte = search_scales(
            blocks, (codes, byte), range(E8M0.magnitudes.size), encode_with,
            E8M0.values, np.ones((1, 1, 1), np.float32), exponent_of(v), element, request.method,
        )  # fmt: skip
    return codes, byte


def _search_as_peer(
    blocks: F32, start: tuple[U8, U8], search: ScaleSearch, encode_with: Encode, method: Method
) -> tuple[U8, U8]:
    """Codes and bytes of the peer's own search. Where it keeps the byte the codes stay too: a NaN scale has no byte."""
    codes, byte = start
    chosen = search(blocks, byte, method)
    return np.where(chosen == byte, codes, encode_with(chosen)), chosen
