"""Split rows into blocks and join them again. Blocks run along the last axis; all axes before it count as rows."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

T = TypeVar("T", bound=np.generic)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def split(x: npt.NDArray[T], block: int, tile_rows: int = 1) -> npt.NDArray[T]:
    """(..., K) as (rows, blocks, block), padded with zeros on the right and at the bottom to whole tiles."""
    flat = x.reshape(-1, x.shape[-1])
    rows, width = flat.shape
    padding = (-rows % tile_rows, -width % block)
    if any(padding):
        flat = np.pad(flat, [(0, padding[0]), (0, padding[1])])
    return flat.reshape(flat.shape[0], -1, block)


def join(blocks: npt.NDArray[T], shape: tuple[int, ...]) -> npt.NDArray[T]:
    """(rows, blocks, block) back to `shape`, without the padding: the inverse of `split`."""
    rows, width = int(np.prod(shape[:-1])), shape[-1]
    return blocks.reshape(blocks.shape[0], -1)[:rows, :width].reshape(shape)


def over_tiles(blocks: npt.NDArray[T], tile_rows: int) -> npt.NDArray[T]:
    """(rows, blocks, block) as (tile rows, blocks, rows of a tile, block)."""
    rows, count, block = blocks.shape
    return blocks.reshape(rows // tile_rows, tile_rows, count, block).swapaxes(1, 2)


def repeat_rows(per_tile: npt.NDArray[T], tile_rows: int) -> npt.NDArray[T]:
    """(tile rows, blocks) as (rows, blocks, 1): each row of a tile gets the tile's number."""
    return np.repeat(per_tile, tile_rows, axis=0)[..., None]
