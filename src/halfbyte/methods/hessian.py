"""The best scale for the output of a layer: a Hessian gives the error of the output, and the least error wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError, unknown_name
from halfbyte.methods.spec import Method, frozen_copy

CODES = ("nearest", "descent")


@dataclass(frozen=True, eq=False)
class Hessian(Method):
    """The scale of the format that minimises rᵀHr, where r is the rounding error of a block.

    `h`: shape (K/block, block, block), one symmetric matrix per block of columns. `hessian_from_activations` computes
    it from the inputs of a layer. `codes`: "nearest" keeps the nearest codes; "descent" then moves single codes by one
    step while rᵀHr falls, so it is never worse in the float32 arithmetic of the objective. All-zero blocks, and blocks
    with NaN or Inf, keep the scale of `amax`.

    The array is copied. Backends derive numbers from it and keep them with this object, so use one object for many
    tensors.
    """

    h: object
    codes: Literal["nearest", "descent"] = "nearest"
    name: ClassVar[str] = "hessian"
    everywhere: ClassVar[bool] = True
    one_row: ClassVar[bool] = True
    needs: ClassVar[str] = "its matrices: give hb.Hessian(h), h from activations"

    def __post_init__(self) -> None:
        matrices = self.matrices
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.size == 0:
            raise InputError(f"h has shape {matrices.shape}; it must be (K/block, block, block)")
        if not np.isfinite(matrices).all():
            raise InputError("h holds NaN or Inf")
        if not np.array_equal(matrices, matrices.swapaxes(1, 2)):
            raise InputError("h is not symmetric; give (h + hᵀ)/2, which has the same rᵀHr")
        if self.codes not in CODES:
            raise unknown_name("codes of Hessian", self.codes, CODES)
        object.__setattr__(self, "h", frozen_copy(matrices))

    def check_width(self, width: int, block: int) -> None:
        count, size, _ = self.matrices.shape
        if count * block != width or size != block:
            raise InputError(
                f"h has shape {self.matrices.shape}, but a last axis of {width} with blocks of {block} needs "
                f"({width / block:g}, {block}, {block})"
            )

    @property
    def matrices(self) -> npt.NDArray[np.float32]:
        """The matrices as float32."""
        return np.asarray(self.h, dtype=np.float32)


def hessian_from_activations(
    x: npt.NDArray[np.generic] | Iterable[npt.NDArray[np.generic]], block: int = 16
) -> npt.NDArray[np.float32]:
    """XᵀX of each block of columns, shape (K/block, block, block), from activations (tokens, K) or chunks of them.

    Sums run in float64, chunk by chunk in the order given; the result is rounded to float32 once.
    """
    chunks: Iterable[npt.NDArray[np.generic]] = [x] if isinstance(x, np.ndarray) else x
    total: npt.NDArray[np.float64] | None = None
    for chunk in chunks:
        width = chunk.shape[-1] if chunk.ndim else 0
        if chunk.size == 0 or width % block:
            raise InputError(f"activations of shape {chunk.shape}: the last axis must be a multiple of {block}")
        columns = chunk.reshape(-1, width // block, block).astype(np.float64)
        part = np.einsum("tki,tkj->kij", columns, columns)
        if total is not None and total.shape != part.shape:
            raise InputError(f"activation chunks differ in width: {total.shape[0] * block} and {width}")
        total = part if total is None else total + part
    if total is None:
        raise InputError("no activations: give an array (tokens, K) or at least one chunk")
    return total.astype(np.float32)
