"""The parent class of all methods."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, eq=False)
class Method:
    """A way to choose block scales, with its options. It contains no arithmetic and knows no backend.

    Methods with plain options compare by value. A method that holds arrays is equal only to itself, because backends
    cache what they derive from the arrays under the method as key.
    """

    name: ClassVar[str]


def frozen_copy(array: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A read-only copy, so that everything derived from it stays valid."""
    copy = np.array(array)
    copy.setflags(write=False)
    return copy
