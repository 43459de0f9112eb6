"""The best scale for the output of a layer: a Hessian gives the error of the output, and the least error wins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError, unknown_name
from halfbyte.methods.optimal import checked_headroom
from halfbyte.methods.spec import Method, frozen_copy, is_tensor, numbers, refuse_arrays

if TYPE_CHECKING:
    from torch import Tensor

CODES = ("nearest", "descent")
NEGATIVE = 1e-3
"""A negative eigenvalue up to this share of the largest one is taken for rounding."""


@dataclass(frozen=True, eq=False)
class Hessian(Method):
    """The scale of the format that minimises rᵀHr, where r is the rounding error of a block.

    `h`: shape (K/block, block, block), one symmetric positive semidefinite matrix per block of columns.
    `hessian_from_activations` computes it from the inputs of a layer. `codes`: "nearest" keeps the nearest codes;
    "descent" then moves single codes by one step while rᵀHr falls, so it is never worse in the float32 arithmetic of
    the objective. All-zero blocks, and blocks with NaN or Inf, keep the scale of `amax`.

    `headroom`: as in `Optimal`. Which of several is the best, or the best of the default, is the choice that `Optimal`
    makes for the tensor, by squared error.

    The array is copied. Backends derive numbers from it and keep them with this object, so use one object for many
    tensors.
    """

    h: object
    codes: Literal["nearest", "descent"] = "nearest"
    headroom: float | tuple[float, ...] | None = None
    name: ClassVar[str] = "hessian"
    everywhere: ClassVar[bool] = True
    one_row: ClassVar[bool] = True
    needs: ClassVar[str] = "its matrices: give hb.Hessian(h), h from activations"
    variants: ClassVar[tuple[str, ...]] = ("hessian:descent",)

    def __post_init__(self) -> None:
        matrices = self.matrices
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.size == 0:
            raise InputError(f"h has shape {matrices.shape}; it must be (K/block, block, block)")
        if not np.isfinite(matrices).all():
            raise InputError("h holds NaN or Inf")
        if not np.array_equal(matrices, matrices.swapaxes(1, 2)):
            raise InputError("h is not symmetric; give (h + hᵀ)/2, which has the same rᵀHr")
        _check_semidefinite(matrices)
        refuse_arrays(self)
        if self.codes not in CODES:
            raise unknown_name("codes of Hessian", self.codes, CODES)
        object.__setattr__(self, "headroom", checked_headroom(self.headroom, "Hessian"))
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
        return numbers(self.h, np.float32, "h")


def _check_semidefinite(matrices: npt.NDArray[np.float32]) -> None:
    """Raise if an error could count as negative. What rounding takes from XᵀX is allowed for."""
    values = np.linalg.eigvalsh(matrices.astype(np.float64))
    wrong = np.flatnonzero(values[:, 0] < -NEGATIVE * np.abs(values).max(axis=1))
    if wrong.size:
        first, least = int(wrong[0]), values[:, 0]
        raise InputError(
            f"h[{first}] is not positive semidefinite: it has the eigenvalue {least[first]:.3g}, and {wrong.size} of "
            f"{len(matrices)} matrices have such a one. XᵀX never has; add {-least.min():.3g} to the diagonals, or "
            "take hb.hessian_from_activations"
        )


@overload
def hessian_from_activations(x: npt.NDArray[Any], block: int = 16) -> npt.NDArray[np.float32]: ...


@overload
def hessian_from_activations(x: Tensor, block: int = 16) -> Tensor: ...


@overload
def hessian_from_activations(x: Iterable[object], block: int = 16) -> Any: ...


def hessian_from_activations(x: object, block: int = 16) -> Any:
    """XᵀX of each block of columns, shape (K/block, block, block), float32, from activations (tokens, K) or chunks.

    Sums run in float64 on the CPU, chunk by chunk in the order given; the result is rounded to float32 once. Torch
    tensors give a torch tensor on the device of the first chunk, numpy arrays give a numpy array. NaN, Inf and sums
    that exceed float32 raise.

    x: activations, numpy arrays or torch tensors, with any leading axes; or an iterable of such chunks, of which some
        may have no tokens.
    block: the format's block length; K is a multiple of it.

    >>> import torch
    >>> h = hessian_from_activations(torch.ones(5, 32))
    >>> h.shape, h[0, 0, 0].item()
    (torch.Size([2, 16, 16]), 5.0)
    """
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise InputError(f"block must be a whole number of at least 1, not {block!r}")
    chunks = [x] if isinstance(x, np.ndarray) or is_tensor(x) else x
    if not isinstance(chunks, Iterable):
        raise InputError(f"activations must be an array (tokens, K) or chunks of it, not {type(x).__name__}")
    total: npt.NDArray[np.float64] | None = None
    first: Any = None
    for chunk in chunks:
        first = chunk if total is None else first
        part = _squared(chunk, block)
        if total is not None and total.shape != part.shape:
            raise InputError(f"activation chunks differ in width: {len(total) * block} and {len(part) * block}")
        total = part if total is None else total + part
    if total is None:
        raise InputError("no activations: give an array (tokens, K) or at least one chunk")
    with np.errstate(over="ignore"):
        rounded = total.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise InputError("XᵀX of these activations exceeds float32; divide them by their largest magnitude first")
    return first.detach().new_tensor(rounded, dtype=first.float().dtype) if is_tensor(first) else rounded


def _squared(chunk: object, block: int) -> npt.NDArray[np.float64]:
    """XᵀX of one chunk in float64."""
    values = numbers(chunk, np.float64, "activations")
    width = values.shape[-1] if values.ndim else 0
    if width == 0 or width % block:
        raise InputError(f"activations of shape {values.shape}: the last axis must be a multiple of {block}")
    if not np.isfinite(values).all():
        raise InputError(f"activations of shape {values.shape} hold NaN or Inf; leave out the tokens that have them")
    columns = values.reshape(-1, width // block, block)
    squared: npt.NDArray[np.float64] = np.einsum("tki,tkj->kij", columns, columns)
    return squared
