"""The statistics of one input, made ready for the solver: checked, damped, ordered and factored. Once per input.

In float64, rounded to float32 at the end. A is the matrix of second moments with λ added to its diagonal, in the order
in which columns are decided. A = R·D·Rᵀ with R unit upper triangular; row j of R says how the error of column j is made
good by the later ones. R comes from the Cholesky factor of A with rows and columns reversed.
"""

from __future__ import annotations

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
    cross = None if cross_moment is None or chosen.asymmetry == 0 else _square(cross_moment, f"{name}: cross_moment")
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
        a = _damped(h, dead, damping * mean, mean)
        r = _unit_factor(a[np.ix_(columns, columns)])
        if r is not None:
            break
        if damping >= 1:
            raise InputError(f"{name} cannot be factored, even with damping 1: it is not positive semidefinite")
        damping, damped = min(1.0, damping * STEP if damping else FIRST), True
    feedback = Feedback(
        order=order.astype(np.int64),
        factor=r,
        objective=Hessian(_by_block(a, block)),
        shift=None if cross is None else _shift(a, cross, dead, chosen.asymmetry),
        moments=_in_range(a[np.ix_(columns, columns)]),
        sweeps=chosen.descent,
    )
    used = replace(chosen, damping=damping)
    return Factor(h.shape[0], block, used, feedback, int(dead.sum()), damped)


def _square(values: object, name: str) -> F64:
    found: F64 = numbers(values, np.float64, name)
    if found.ndim != 2 or found.shape[0] != found.shape[1] or found.size == 0:
        raise InputError(f"{name} has shape {found.shape}; it must be (K, K), K the width of the input")
    if not np.isfinite(found).all():
        raise InputError(f"{name} of shape {found.shape} holds NaN or Inf; leave out the tokens that have them")
    return found


def _checked(second_moment: object, name: str, block: int) -> F64:
    """The matrix as symmetric float64; it must be able to be one of second moments."""
    h = _square(second_moment, name)
    if h.shape[0] % block:
        raise InputError(f"{name} of shape {h.shape}: the width must be a multiple of the block, {block}")
    diagonal = h.diagonal()
    if (diagonal < 0).any():
        raise InputError(f"{name} has a negative number on its diagonal ({diagonal.min():.3g}); squares have none")
    root = np.sqrt(diagonal)
    if (np.abs(h - h.T) > SKEW * np.outer(root, root)).any():
        raise InputError(f"{name} of shape {h.shape} is not symmetric; give the sum of x·xᵀ over tokens")
    return (h + h.T) / 2


def _damped(h: F64, dead: npt.NDArray[np.bool_], added: float, mean: float) -> F64:
    """A: λ on the diagonal. Dead inputs have λ alone, or a hundredth of the mean if there is no λ."""
    a = h.copy()
    a[np.diag_indices_from(a)] += added
    places = np.flatnonzero(dead)
    a[places, places] = added if added > 0 else 0.01 * mean
    return a


def _unit_factor(a: F64) -> F32 | None:
    """R of A = R·D·Rᵀ as float32; None if A is not positive definite."""
    try:
        lower = np.linalg.cholesky(np.ascontiguousarray(a[::-1, ::-1]))
    except np.linalg.LinAlgError:
        return None
    upper = lower[::-1, ::-1]
    unit = (upper / upper.diagonal()).astype(np.float32)
    return np.ascontiguousarray(unit) if np.isfinite(unit).all() else None


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
    """N = −a·C·A⁻¹, so that the target is W − W·N."""
    c = cross.copy()
    c[:, dead] = 0
    shift = (-asymmetry * np.linalg.solve(a, c.T).T).astype(np.float32)
    if not np.isfinite(shift).all():
        raise InputError("the cross moments are too large for the second moments: the target exceeds float32")
    return np.ascontiguousarray(shift)


def _in_range(a: F64) -> F32:
    """A as float32, scaled by a power of two so that the largest entry is in [1, 2) before it is rounded."""
    return np.ascontiguousarray(np.ldexp(a, -(int(np.frexp(np.abs(a).max())[1]) - 1)).astype(np.float32))
