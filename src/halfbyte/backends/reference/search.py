"""The exact searches in the reference: on every block, the scales of the format are tried in ascending order.

All backends use the same objective, so they agree bit for bit. g is the multiplier of the block scales (1 for MX) and
k = floor(log2 g) (for MX, k = floor(log2 amax) of the block). Everything is first scaled by 2**-k, which
keeps squares in range, and is exact but for elements that become smaller than the normal numbers of float32:

    x' = x·2**-k            s' = scale·(g·2**-k)            r_i = q_i·s' − x'_i
    Optimal: Σ r_i·r_i, or Σ w_i·(r_i·r_i), added in index order
    Hessian: Σ_i r_i·(h_ii·r_i + Σ_{j>i} (2·h_ij)·r_j), both sums in index order

q is the value that the contract's own element formula and rounding give for that scale. All operations are float32,
rounded once, never fused. Weights and Hessians are scaled by a power of two that brings the largest entry into [1, 2).
A candidate wins only if its error is strictly smaller, so of two equal scales the smaller one wins.

Optimal leaves out scales that a proof excludes (docs/methods.md): if half of a scale is also a scale, and 7 times that
half (464 times for E4M3 elements) reaches the amax of the block, then the half is at least as good for every element.
Hessian tries every scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halfbyte.codec.bits import F32, I32, U8
from halfbyte.codec.element import decode
from halfbyte.contracts.reductions import sequential
from halfbyte.formats.spec import ElementFormat
from halfbyte.methods import Hessian, Method, Optimal

Encode = Callable[[U8], U8]
"""Scale bytes (rows, blocks, 1) to element codes (rows, blocks, block) under the contract."""


def exponent_of(x: F32) -> I32:
    """floor(log2 x) of positive numbers, exact; 0 for zero, NaN and Inf."""
    usable = np.isfinite(x) & (x > 0)
    return np.where(usable, np.frexp(np.where(usable, x, 1).astype(np.float32))[1] - 1, 0).astype(np.int32)


@dataclass(frozen=True)
class ScaleGrid:
    """The scales that a search may choose from, with g and k of the formula above."""

    first: int
    """The smallest scale byte that is tried. Every larger finite byte is tried too."""
    format: ElementFormat
    """The format of the scales."""
    multiplier: F32
    """g. Both g and `exponent`, which is k, broadcast to (rows, blocks, 1)."""
    exponent: I32


ScaleSearcher = Callable[[F32, tuple[U8, U8], ScaleGrid, Encode, ElementFormat, Method], tuple[U8, U8]]
"""How a method that searches computes: as `search_scales` does, whose arguments it takes."""


def search_scales(
    blocks: F32, start: tuple[U8, U8], grid: ScaleGrid, encode: Encode, element: ElementFormat, method: Method
) -> tuple[U8, U8]:
    """Codes and scale bytes with the smallest objective, for every block.

    `start`: codes and bytes of the amax method. Blocks that are not searched keep them.
    """
    return _search(blocks, start, grid, encode, element, method)[:2]


def least_errors(blocks: F32, grid: ScaleGrid, encode: Encode, element: ElementFormat, method: Method) -> F32:
    """The smallest objective of every block, in its unit 4**k: (rows, blocks, 1). 0 where nothing is searched."""
    zeros = np.zeros((*blocks.shape[:2], 1), np.uint8)
    return _search(blocks, (np.zeros(blocks.shape, np.uint8), zeros), grid, encode, element, method)[2]


def _search(
    blocks: F32, start: tuple[U8, U8], grid: ScaleGrid, encode: Encode, element: ElementFormat, method: Method
) -> tuple[U8, U8, F32]:
    scale_values, multiplier, exponent = grid.format.values, grid.multiplier, grid.exponent
    halves = half_scales(scale_values) if isinstance(method, Optimal) else {}
    reach = np.float32(element.max + (element.max - float(element.magnitudes[-2])) / 2)
    codes, byte = start[0].copy(), np.broadcast_to(start[1], (*blocks.shape[:2], 1)).copy()
    amax = np.abs(blocks).max(axis=-1, keepdims=True)
    searched = np.isfinite(amax) & (amax > 0) & np.isfinite(multiplier) & (multiplier > 0)
    if not searched.any():
        return codes.astype(np.uint8), byte.astype(np.uint8), np.zeros(byte.shape, np.float32)
    scaled = np.ldexp(blocks, -exponent).astype(np.float32)
    scaled_amax = np.abs(scaled).max(axis=-1, keepdims=True)
    unit = np.ldexp(multiplier, -exponent).astype(np.float32)
    measure = _objective(method, blocks.shape)
    best = np.full(byte.shape, np.inf, np.float32)
    for candidate in range(grid.first, grid.format.magnitudes.size):
        tried = np.full(byte.shape, candidate, np.uint8)
        scale = scale_values[candidate] * unit
        tried_codes = encode(tried)
        error = measure(decode(tried_codes, element) * scale - scaled)[..., None]
        better = searched & (error < best)
        if candidate in halves:
            better &= ~(reach * (scale_values[halves[candidate]] * unit) >= scaled_amax)
        best = np.where(better, error, best)
        byte, codes = np.where(better, tried, byte), np.where(better, tried_codes, codes)
    if isinstance(method, Hessian) and method.codes == "descent":
        scale = scale_values[byte] * unit
        codes = np.where(searched, descend(codes, scale, scaled, measure, element), codes)
    return codes.astype(np.uint8), byte.astype(np.uint8), np.where(searched, best, np.float32(0)).astype(np.float32)


def _objective(method: Method, shape: tuple[int, ...]) -> Callable[[F32], F32]:
    """The error of each block from its differences (rows, blocks, block)."""
    if isinstance(method, Hessian):
        matrices = method.matrices
        matrices = np.ldexp(matrices, -exponent_of(np.abs(matrices).max())).astype(np.float32)
        return lambda r: _quadratic(r, matrices)
    weights = method.channel_weights if isinstance(method, Optimal) else None
    if weights is None:
        return lambda r: sequential(r * r)
    padded = np.zeros(shape[1] * shape[2], np.float32)
    padded[: weights.size] = np.ldexp(weights, -exponent_of(weights.max()))
    by_block = padded.reshape(shape[1:])
    return lambda r: sequential(by_block * (r * r))


def half_scales(scale_values: F32) -> dict[int, int]:
    """From each scale code whose half is also a scale to the code of that half."""
    codes = {float(value): code for code, value in enumerate(scale_values) if value > 0}
    return {code: codes[value / 2] for value, code in codes.items() if value / 2 in codes}


def _quadratic(r: F32, matrices: F32) -> F32:
    """rᵀHr of a symmetric H, computed from its upper triangle; inner and outer sum run in index order."""
    size = r.shape[-1]
    total = np.zeros_like(r[..., 0])
    for i in range(size):
        inner = matrices[:, i, i] * r[..., i]
        for j in range(i + 1, size):
            inner = inner + (np.float32(2) * matrices[:, i, j]) * r[..., j]
        total = total + r[..., i] * inner
    return total


def descend(codes: U8, scale: F32, scaled: F32, measure: Callable[[F32], F32], element: ElementFormat) -> U8:
    """Move single codes by one step of the grid while the objective falls.

    A pass visits the elements in index order and tries the lower neighbour first. Passes repeat until one changes
    nothing. A code that moves to zero becomes code 0.
    """
    grid = np.unique(element.values[np.isfinite(element.values)] + np.float32(0))  # ascending, one zero
    grid_codes = np.array([_code_of(value, element) for value in grid], np.uint8)
    position = np.searchsorted(grid, decode(codes, element) + np.float32(0))
    position = np.minimum(position, grid.size - 1)  # NaN is not on the grid; its block is not searched
    best = measure(grid[position] * scale - scaled)
    moved = np.zeros(codes.shape, bool)
    changed = True
    while changed:
        changed = False
        for index in range(codes.shape[-1]):
            for step in (-1, 1):
                tried = position.copy()
                tried[..., index] = np.clip(tried[..., index] + step, 0, grid.size - 1)
                error = measure(grid[tried] * scale - scaled)
                better = error < best
                if better.any():
                    changed = True
                    best = np.where(better, error, best)
                    position = np.where(better[..., None], tried, position)
                    moved[..., index] |= better
    return np.where(moved, grid_codes[position], codes).astype(np.uint8)


def _code_of(value: np.float32, element: ElementFormat) -> int:
    magnitude = int(np.searchsorted(element.magnitudes, abs(value)))
    return magnitude | (element.sign_code if value < 0 else 0)


SEARCHES: dict[type[Method], ScaleSearcher] = {Optimal: search_scales, Hessian: search_scales}
"""The methods that choose among all scales of the format, whatever the contract. Others leave the amax method's."""


def searcher_of(method: Method) -> ScaleSearcher | None:
    """The function that computes a method, or the one it derives from; None where there is nothing to search."""
    return next((SEARCHES[kind] for kind in type(method).__mro__ if kind in SEARCHES), None)
