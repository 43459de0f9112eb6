"""The scalars of a tensor: its scale, and that of its activations, in the direction that the layout stores."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.engine import TensorScales
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import SourceMatrix, View, read_rows
from halfbyte.checkpoint.plan.types import Output, Unit
from halfbyte.errors import CheckpointError


def scalar_of(
    files: Files, unit: Unit, output: Output, source: SourceMatrix, scales: TensorScales | None
) -> npt.NDArray[np.float32]:
    """The number for one output. scales: those that were computed; None: the source stores them."""
    role = output.part.role
    one = np.float32(1)
    if role in ("input_multiplier", "input_divisor"):
        divides = role == "input_divisor"
        if unit.input_scale is not None:
            value = np.float32(unit.input_scale)
            return np.array([one / value if divides else value], np.float32)
        word = _stored_word(files, source.input_scale, unit.module)
    else:
        divides = role == "divisor"
        if scales is not None:
            return np.array([scales.divisor if divides else scales.multiplier], np.float32)
        word = _stored_word(files, source.global_scale, unit.module)
    return np.array([word if source.divides == divides else one / word], np.float32)


def _stored_word(files: Files, view: View | None, module: str) -> np.float32:
    """A scalar as the source stores it."""
    if view is None:
        raise CheckpointError(f"{module} has no stored scale where one is needed")
    return np.float32(read_rows(files, view, 0, 1, Arena(256)).astype(np.float32)[0, 0])
