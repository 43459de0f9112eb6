"""The parent class of all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError


@dataclass(frozen=True, eq=False)
class Method:
    """A way to choose block scales, with its options. It contains no arithmetic and knows no backend.

    Methods with plain options compare by value. A method that holds arrays is equal only to itself, because backends
    cache what they derive from the arrays under the method as key.
    """

    name: ClassVar[str]
    everywhere: ClassVar[bool] = False
    """True: every contract has the method, because it uses nothing but the contract's own formulas. False: a contract
    has to define it."""
    one_row: ClassVar[bool] = False
    """True: it chooses scales for blocks of one row, so a tile cannot span several."""
    needs: ClassVar[str] = ""
    """What the caller has to give, if the method cannot be asked for by name alone."""

    def check_width(self, width: int, block: int) -> None:
        """Raise if the method's arrays do not belong to operands of that width. A method without arrays has no say."""
        return


def is_tensor(values: object) -> bool:
    """Whether something is a torch tensor. Methods know nothing of torch, so they go by what only a tensor has."""
    return hasattr(values, "detach") and hasattr(values, "numpy")


def numbers(values: Any, dtype: type[np.floating[Any]], what: str) -> npt.NDArray[Any]:
    """Values as a numpy array of that dtype. A torch tensor is copied from its device."""
    try:
        if is_tensor(values):
            values = values.detach().cpu().double().numpy()
        return np.asarray(values, dtype=dtype)
    except (TypeError, ValueError) as error:
        raise InputError(f"{what} must be an array of numbers, not {type(values).__name__}: {error}") from error


def frozen_copy(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A read-only copy, so that everything derived from it stays valid."""
    copy = np.array(array)
    copy.setflags(write=False)
    return copy
