"""4over6 in the reference: quantize with both scales, measure both errors, keep the better. A tie or NaN keeps 6."""

from __future__ import annotations

import numpy as np

from halfbyte.codec.bits import F32, U8
from halfbyte.codec.blocks import over_tiles, repeat_rows
from halfbyte.codec.element import decode
from halfbyte.contracts.arithmetic import four_six_error, scale_byte
from halfbyte.contracts.reductions import maximum, maximum_flat
from halfbyte.contracts.rounding import round_elements
from halfbyte.contracts.spec import FourSixRule, NVFP4Rule, TensorScale
from halfbyte.formats import E4M3
from halfbyte.methods import FourSix
from halfbyte.request import Request


def choose_four_six(blocks: F32, v: F32, t: TensorScale, rule: NVFP4Rule, request: Request) -> tuple[U8, U8]:
    """Codes and scale bytes for the better of the two scales of each block or tile."""
    four_six, method = rule.four_six, request.method
    if four_six is None or not isinstance(method, FourSix):
        raise TypeError("choose_four_six needs a rule with 4over6 and its method")
    base = four_six.pre_scale(v, t)
    candidates = []
    for pre_scale in (base, base * np.float32(1.5)):
        byte = scale_byte(pre_scale, rule.scale_byte)
        scale = decode(byte, E4M3)
        codes, q = round_elements(blocks, rule.element(blocks, scale, t), request.format.element, rule.rounding)
        difference = four_six_error(four_six, method, request.scaling)(q, scale, blocks, t)
        size = difference * difference if method.error == "mse" else np.abs(difference)
        candidates.append((codes, byte, _total(size, four_six, method, request.tile[0])))
    (codes_six, byte_six, error_six), (codes_four, byte_four, error_four) = candidates
    four = error_four < error_six
    return np.where(four, codes_four, codes_six), np.where(four, byte_four, byte_six)


def _total(size: F32, four_six: FourSixRule, method: FourSix, tile_rows: int) -> F32:
    """Error of each block, or error of each tile, repeated on its rows: (rows, blocks, 1)."""
    if tile_rows == 1:
        return (maximum if method.error == "abs_max" else four_six.block_sum)(size)[..., None]
    tile_sum = maximum_flat if method.error == "abs_max" else four_six.tile_sum
    if tile_sum is None:
        raise TypeError("this contract has no tiles")
    return repeat_rows(tile_sum(over_tiles(size, tile_rows)), tile_rows)
