"""Matrices of numbers at hand, as verify reads them."""

from __future__ import annotations

from typing import Any

import numpy as np

from halfbyte.verify.values import Matrix


def matrix(name: str, values: Any, **more: Any) -> Matrix:
    """A matrix of float32 that is read row by row; `more`: further fields."""
    numbers = np.asarray(values, np.float32)
    kind = more.pop("kind", "f32")
    rows, columns = numbers.shape
    return Matrix(name, (rows, columns), kind, (name,), lambda start, stop: numbers[start:stop], **more)
