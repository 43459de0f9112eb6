"""What a solver with error feedback is given besides the weights: one layer's statistics, factored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import F32
from halfbyte.methods import Hessian

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Feedback:
    """The numbers of docs/gptq.md for one input of width K. Rows and columns of `factor` and `moments` are in the order
    in which columns are decided; those of `shift` and the blocks of `objective` are in the order of the weights."""

    order: I64
    """(blocks,): the number of the block that is decided first, second and so on."""
    factor: F32
    """R, (K, K): unit upper triangular."""
    objective: Hessian
    """The matrix of every block, by which its scale is chosen; the largest entry of each is in [1, 2)."""
    shift: F32 | None
    """N, (K, K): the target is W − W·N. None: the target is W."""
    moments: F32 | None
    """The damped second moments, (K, K), which the descent needs; None without one."""
    sweeps: int = 0
    """Sweeps of the descent."""

    @property
    def columns(self) -> I64:
        """The column of the weights that is decided first, second and so on."""
        block = self.objective.matrices.shape[1]
        found: I64 = (self.order[:, None] * block + np.arange(block)).reshape(-1)
        return found
