"""FP8 weights with their scales, read only: DeepSeek's blocks of 128, compressed-tensors' and Model-Optimizer's FP8.

They differ in the name of the scale. It may be one per tensor, per row, per column, or per block; edges may be partial.
"""

from __future__ import annotations

from halfbyte.errors import CheckpointError
from halfbyte.layouts.description import FLOATS, Claim, Json, Layout, PartRule, Storage

BLOCKS = (128, 64, 32, 16, 256)
"""Block lengths along an axis, in the order in which they are tried."""


def fp8_grid(rows: int, columns: int, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many scales lie along the two axes of a weight."""
    grid = _grid(shape)
    block_length(rows, grid[0])
    block_length(columns, grid[1])
    return grid


def _grid(shape: tuple[int, ...]) -> tuple[int, int]:
    """Axes of scales as two. Model-Optimizer writes [rows, 1, columns, 1]."""
    if len(shape) == 4 and shape[1] == shape[3] == 1:
        return shape[0], shape[2]
    axes = [axis for axis in shape if axis != 1]
    if len(axes) > 2:
        raise CheckpointError(f"scales of shape {list(shape)} are not known for FP8")
    if len(axes) == 2:
        return axes[0], axes[1]
    flat = axes[0] if axes else 1
    return (1, flat) if len(shape) == 2 and shape[0] == 1 else (flat, 1)


def block_length(size: int, scales: int) -> int:
    """Elements along an axis that share a scale: all, one, or 128 (the last block may be partial)."""
    if scales == 1:
        return size
    if scales == size:
        return 1
    for length in BLOCKS:
        if -(-size // length) == scales:
            return length
    raise CheckpointError(
        f"{scales} scales do not fit an axis of {size} elements: neither one, nor one per row, nor 128s"
    )


STORAGES = tuple(
    Storage(
        name=f"fp8 ({suffix[1:]})",
        layout="fp8",
        format="fp8",
        packing=1,
        parts=(
            PartRule("codes", ".weight", ("F8_E4M3",), ("rows", "columns")),
            PartRule("scales", suffix, ("F32", "BF16", "F16", "F8_E8M0", "U8"), fp8_grid, tells="presence"),
            PartRule("input_multiplier", ".input_scale", FLOATS, (), optional=True),
        ),
    )
    for suffix in (".weight_scale_inv", ".weight_scale", ".scale")
)


def read_config(config: Json) -> Claim:
    return Claim("fp8", False, beside=("fp8", "deepseek"))


LAYOUT = Layout(name="fp8", quant_method="fp8", read_only=STORAGES, read_config=read_config)
