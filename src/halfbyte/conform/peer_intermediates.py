"""What some peers return beside codes and scales: intermediate numbers, taken from the contract's own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import to_numpy
from halfbyte.casting.closed_form import closed_form_amax
from halfbyte.casting.rows import read
from halfbyte.codec.bits import F32, dtype_name, widen
from halfbyte.codec.blocks import join, split
from halfbyte.codec.element import decode
from halfbyte.contracts import Contract, MXRule, NVFP4Rule
from halfbyte.contracts.arithmetic import block_amax, scale_byte, statistics_dtype, tensor_scale
from halfbyte.contracts.peers.modelopt_cast import count_lossless, largest_exponent
from halfbyte.contracts.searches.qwantize import fused_multiply_add
from halfbyte.contracts.searches.static import fake_quantize, searched_scale
from halfbyte.contracts.spec import CastRule, TensorScale
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E4M3, BlockFormat
from halfbyte.methods import Method
from halfbyte.request import resolve
from halfbyte.types import QuantizedTensor

Outputs = dict[str, npt.NDArray[Any]]


def _scaled(
    x: npt.NDArray[Any], format: BlockFormat, contract: Contract, rule: NVFP4Rule
) -> tuple[F32, TensorScale, Method]:
    """Blocks of x, the tensor-level numbers under the contract's presets, and its method."""
    request = resolve(format, contract, dtype=dtype_name(x.dtype))
    blocks = split(widen(x), format.block)
    amax = np.abs(blocks).max(axis=(1, 2) if request.scaling == "row" else (0, 1, 2), keepdims=True)
    return blocks, tensor_scale(amax, rule, request.method, request.dtype), request.method


@np.errstate(all="ignore")
def static_search(x: npt.NDArray[Any], format: BlockFormat, contract: Contract) -> Outputs:
    """Model-Optimizer: the block amax that its search chose, and the copy quantized with it."""
    rule = contract.rule(format)
    if not isinstance(rule, NVFP4Rule):
        raise UnsupportedError(f"no static weights in {format.name}")
    blocks, t, method = _scaled(x, format, contract, rule)
    amax = block_amax(blocks)
    if rule.block_search is not None and method in rule.searches:
        amax = rule.block_search(blocks, amax, t, method)
    copy = fake_quantize(blocks, searched_scale(amax, t))
    return {
        "block_amax": amax[..., 0].reshape(*x.shape[:-1], -1),
        "fake_quant": join(copy, x.shape),
    }


def closed_form(source: QuantizedTensor, rule: CastRule) -> Outputs:
    """Model-Optimizer's cast: the amaxes of the tensor and of its blocks, and the blocks it takes for lossless."""
    piece = read(source, "source")
    k_max = largest_exponent(piece.scales)
    amax = np.repeat(closed_form_amax(piece, rule), piece.block // 16, axis=1)
    lossless = count_lossless(piece.scales, k_max if rule.k_max is None else rule.k_max)
    return {
        "global_amax": np.array([6 * 448 * 2.0 ** (k_max - 8)], np.float64),
        "per_block_amax": amax.reshape(*source.shape[:-1], -1),
        "n_lossless": np.array([lossless], np.int64),
    }


@np.errstate(all="ignore")
def float_scale(x: npt.NDArray[Any], q: QuantizedTensor) -> F32:
    """compressed-tensors: the block scale as a float. It is the byte's value but where an MX scale overflowed."""
    rule = q.contract.rule(q.format)
    if not isinstance(rule, MXRule):
        return decode(to_numpy(q.scales), E4M3)
    amax = block_amax(split(widen(x), q.format.block))
    scale = rule.scale(amax, statistics_dtype(rule, dtype_name(x.dtype)), q.format.element)[1]
    return scale[..., 0].reshape(q.scales.shape)


@np.errstate(all="ignore")
def four_six_choice(x: npt.NDArray[Any], q: QuantizedTensor) -> Outputs:
    """FlashInfer: A, and 1 for each block whose scale is not the one that maps its amax to 6."""
    rule = q.contract.rule(q.format)
    if not isinstance(rule, NVFP4Rule) or rule.four_six is None:
        raise UnsupportedError(f"no 4over6 in {q.contract}")
    blocks, t, _ = _scaled(x, q.format, q.contract, rule)
    six = scale_byte(rule.four_six.pre_scale(block_amax(blocks), t), rule.scale_byte)
    picked = (six[..., 0].reshape(q.scales.shape) != to_numpy(q.scales)).astype(np.uint8)
    return {"amax": t.amax.reshape(-1), "picked_four": picked}


@np.errstate(all="ignore")
def fused_hessian(activations: npt.NDArray[Any], block: int) -> F32:
    """qwantize: XᵀX of each block of columns, (K/block, block, block): fused multiply-adds, token after token.

    The peer leaves this sum to its BLAS; MKL adds up to 192 tokens in this order, and more in several parts.
    """
    columns = widen(activations).reshape(len(activations), -1, block)
    total = np.zeros((columns.shape[1], block, block), np.float32)
    for token in columns:
        total = fused_multiply_add(token[:, :, None], token[:, None, :], total)
    return total
