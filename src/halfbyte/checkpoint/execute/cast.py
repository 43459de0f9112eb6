"""MXFP4 units of a checkpoint as NVFP4: what `hb.cast` does, with rows that come in pieces from files.

The exponents of all pieces come first. Where they fit one window the global scale follows from them. Otherwise the
pieces are read once more for a survey, from which the scale is chosen as `hb.cast` chooses it. The last pass writes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import numpy as np

from halfbyte.casting.optimal import Choice, choose
from halfbyte.casting.rows import Rows
from halfbyte.casting.scales import nvfp4_rule
from halfbyte.casting.survey import survey_of
from halfbyte.casting.window import NO_BLOCKS, Exponents
from halfbyte.checkpoint.execute.engine import TensorScales
from halfbyte.checkpoint.plan.types import Unit
from halfbyte.contracts import Contract, get_contract
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.formats import get_format

MXFP4_BLOCK = get_format("mxfp4").block
NVFP4 = get_format("nvfp4")

ONE_SURVEY = threading.Lock()
"""A survey may take 90 MB, so there is one at a time."""


def decoding_contract(unit: Unit) -> Contract:
    """The contract by which readers decode what is written: it says whether the stored scale multiplies or divides."""
    divides = any(output.part.role == "divisor" for output in unit.outputs)
    return get_contract("compressed_tensors" if divides else "modelopt", NVFP4)


def choose_scale(units: Sequence[Unit], exponents: Exponents | None, rows: Callable[[], Iterable[Rows]]) -> Choice:
    """The global scale that units share; `rows` reads all of them anew, piece by piece."""
    contract = decoding_contract(units[0])
    with nullcontext() if (exponents or NO_BLOCKS).fit else ONE_SURVEY:
        try:
            return choose(exponents, lambda: survey_of(rows()), contract, contract)
        except UnsupportedError as error:
            modules = ", ".join(unit.module for unit in units)
            raise CheckpointError(f"{modules}: {error}; or --keep them") from error


def stored_scales(choice: Choice) -> TensorScales:
    """The chosen scale in both directions. The one that the layout stores is what the choice was made for."""
    scale = choice.scale
    if nvfp4_rule(scale.contract).stored_as == "encode factor":
        return TensorScales(scale.multiplier, scale.stored)
    with np.errstate(over="ignore"):  # the divisor of a subnormal multiplier, which no layout asks for here
        return TensorScales(scale.multiplier, np.float32(1) / scale.multiplier)
