"""The statistics of one input, made ready for the solver: checked, damped, ordered and factored. Once per input.

In float64, rounded to float32 at the end. A is the matrix of second moments with λ added to its diagonal, in the order
in which columns are decided. A = R·D·Rᵀ with R unit upper triangular; row j of R says how the error of column j is made
good by the later ones. R comes from the Cholesky factor of A with rows and columns reversed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from halfbyte.backends.feedback import Feedback, Held
from halfbyte.codec.bits import F32
from halfbyte.errors import InputError
from halfbyte.methods import Gptq, Hessian
from halfbyte.methods.spec import numbers

F64 = npt.NDArray[np.float64]

STEP = 10.0
"""By how much the damping grows if A cannot be factored."""
FIRST = 1e-3
"""The damping after 0."""
STRIP = 256
"""Rows of a matrix at a time, where that changes no bit."""
SKEW = 1e-3
"""By how much two mirrored entries of a second moment may differ, as a share of √(diagonal · diagonal)."""


@dataclass(frozen=True, eq=False)
class Factor:
    """What `prepare` made. q, k and v, or the row chunks of one weight, share one."""

    width: int
    block: int
    method: Gptq
    """The options it was made with; the damping is the one that was needed."""
    feedback: Feedback | Held
    """On the host, or on the GPU that prepared it."""
    dead: int
    """Inputs that were always zero."""
    damped: bool
    """Whether the damping had to be raised."""


def prepare(
    second_moment: object,
    block: int = 16,
    method: Gptq | None = None,
    *,
    cross_moment: object = None,
    device: str | None = None,
    name: str = "second_moment",
) -> Factor:
    """The factor of second moments (K, K), means or sums of x·xᵀ over tokens.

    Inputs that were always zero take no part in the feedback. If the damped matrix is singular, the damping grows
    tenfold until it is not, to 1 at most.

    block: 16 for NVFP4, 32 for MXFP4. cross_moment: means of (x_float − x)·xᵀ, where x_float is the input in the
    unquantized model; it must be scaled as the second moments are. device: a GPU that factors
    ("cuda"); the last bits may then differ. name: how errors call the matrix.
    """
    chosen = Gptq() if method is None else method
    if device is not None and not chosen.descent:
        from halfbyte.feedback.factor_on_device import prepare_on_device

        return prepare_on_device(second_moment, cross_moment, block, chosen, device, name)
    h = _checked(second_moment, name, block)
    cross = None
    if cross_moment is not None and chosen.asymmetry != 0:
        cross = np.array(_square(cross_moment, f"{name}: cross_moment"))
    if cross is not None and cross.shape != h.shape:
        raise InputError(f"{name}: cross_moment has shape {cross.shape}, the second moments {h.shape}")
    diagonal = h.diagonal().copy()
    dead = diagonal == 0
    h[dead], h[:, dead] = 0, 0
    mean = float(diagonal[~dead].mean()) if not dead.all() else 1.0
    totals = diagonal.reshape(-1, block).sum(axis=1)
    order = np.argsort(-totals, kind="stable") if chosen.order == "falling" else np.arange(totals.size)
    columns = (order[:, None] * block + np.arange(block)).reshape(-1)
    damping, damped = chosen.damping, False
    while True:
        _damp(h, diagonal, dead, damping * mean, mean)
        r = _unit_factor(h, columns)
        if r is not None:
            break
        if damping >= 1:
            raise InputError(f"{name} cannot be factored, even with damping 1: it is not positive semidefinite")
        damping, damped = min(1.0, damping * STEP if damping else FIRST), True
    feedback = Feedback(
        order=order.astype(np.int64),
        factor=r,
        objective=Hessian(_by_block(h, block)),
        shift=None if cross is None else _shift(h, cross, dead, chosen.asymmetry),
        moments=_in_range(h, columns) if chosen.descent else None,
        sweeps=chosen.descent,
    )
    used = replace(chosen, damping=damping)
    return Factor(h.shape[0], block, used, feedback, int(dead.sum()), damped)


def factor_memory(width: int, crossed: bool, sweeps: int = 0) -> tuple[int, int]:
    """The most bytes that `prepare` and its arguments take on the host, and those that solving with a factor takes."""
    square = 4 * width * width
    given, shift, moments = (2 if crossed else 1), (1 if crossed else 0), (1 if sweeps else 0)
    making = given + 2 + 1 + (10 if crossed else 6)  # float32 arguments, A, R, and what LAPACK works in
    held = 1 + shift + moments + 0.5 + shift + moments  # and again in the order in which the kernel reads it
    return making * square + 32 * STRIP * width, int((held + 0.5) * square)


def factor_memory_on_device(width: int, crossed: bool) -> tuple[int, int]:
    """The same on a GPU."""
    square = 4 * width * width
    return (18 if crossed else 12) * square, (2 if crossed else 1) * square + 2048 * width


def _square(values: object, name: str) -> F64:
    found: F64 = numbers(values, np.float64, name)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or found.size == 0:
        raise InputError(f"{name} has shape {found.shape}; it must be (K, K), K the width of the input")
    if not np.isfinite(found).all():
        raise InputError(f"{name} of shape {found.shape} holds NaN or Inf; leave out the tokens that have them")
    return found


def _checked(second_moment: object, name: str, block: int) -> F64:
    """The matrix as symmetric float64, of its own memory; it must be able to be one of second moments."""
    h = np.array(_square(second_moment, name))
    if h.shape[0] % block:
        raise InputError(f"{name} of shape {h.shape}: the width must be a multiple of the block, {block}")
    diagonal = h.diagonal()
    if (diagonal < 0).any():
        raise InputError(f"{name} has a negative number on its diagonal ({diagonal.min():.3g}); squares have none")
    root = np.sqrt(diagonal)
    for rows in _strips(len(h)):
        mirrored = h[:, rows].T.copy()
        if (np.abs(h[rows] - mirrored) > SKEW * np.outer(root[rows], root)).any():
            raise InputError(f"{name} of shape {h.shape} is not symmetric; give the sum of x·xᵀ over tokens")
        h[rows] = (h[rows] + mirrored) / 2
        h[rows.stop :, rows] = h[rows, rows.stop :].T
    return h


def _strips(size: int) -> Iterator[slice]:
    """Rows that are worked on at once, so that what is made on the way stays small."""
    for start in range(0, size, STRIP):
        yield slice(start, min(size, start + STRIP))


def _damp(h: F64, diagonal: F64, dead: npt.NDArray[np.bool_], added: float, mean: float) -> None:
    """Make h A: λ is added to its diagonal. Dead inputs have λ alone, or a hundredth of the mean if there is no λ."""
    places = np.arange(len(h))
    h[places, places] = np.where(dead, added if added > 0 else 0.01 * mean, diagonal + added)


def _unit_factor(a: F64, columns: npt.NDArray[np.int64]) -> F32 | None:
    """R of A = R·D·Rᵀ as float32, rows and columns in that order; None if A is not positive definite."""
    back = columns[::-1]
    try:
        lower = np.linalg.cholesky(a[np.ix_(back, back)])
    except np.linalg.LinAlgError:
        return None
    upper = lower[::-1, ::-1]
    unit, diagonal = np.empty(a.shape, np.float32), upper.diagonal().copy()
    for rows in _strips(len(a)):
        unit[rows] = upper[rows] / diagonal
    return unit if np.isfinite(unit).all() else None


def _by_block(a: F64, block: int) -> F32:
    """The block's own part of A for every block, each scaled by a power of two: its largest entry is in [1, 2)."""
    count = a.shape[0] // block
    return scaled_blocks(a.reshape(count, block, count, block)[np.arange(count), :, np.arange(count), :])


def scaled_blocks(parts: F64) -> F32:
    """Matrices (blocks, block, block), each scaled by a power of two: its largest entry is in [1, 2)."""
    exponents = np.frexp(np.abs(parts).max(axis=(1, 2), keepdims=True))[1] - 1
    scaled = np.ldexp(parts, -exponents).astype(np.float32)
    rounded_up = np.abs(scaled).max(axis=(1, 2), keepdims=True) >= 2
    return np.asarray(np.where(rounded_up, scaled / 2, scaled), np.float32)


def _shift(a: F64, cross: F64, dead: npt.NDArray[np.bool_], asymmetry: float) -> F32:
    """N = −a·C·A⁻¹, so that the target is W − W·N. C is changed."""
    cross[:, dead] = 0
    solved = np.linalg.solve(a, cross.T).T
    shift = np.empty(a.shape, np.float32)
    for rows in _strips(len(a)):
        shift[rows] = -asymmetry * solved[rows]
    if not np.isfinite(shift).all():
        raise InputError("the cross moments are too large for the second moments: the target exceeds float32")
    return shift


def _in_range(a: F64, columns: npt.NDArray[np.int64]) -> F32:
    """A as float32 in that order, scaled by a power of two so that the largest entry is in [1, 2) before rounding."""
    exponent = -(int(np.frexp(max(a.max(), -a.min()))[1]) - 1)
    found = np.empty(a.shape, np.float32)
    for rows in _strips(len(a)):
        found[rows] = np.ldexp(a[np.ix_(columns[rows], columns)], exponent)
    return found
