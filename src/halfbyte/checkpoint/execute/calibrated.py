"""Codes of a plan's modules by their statistics, or read from a folder of solved weights."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import Piece
from halfbyte.checkpoint.io.solved import SolvedFolder
from halfbyte.checkpoint.plan.types import Calibrated, Solved, Unit
from halfbyte.codec.bits import F32, U8, widen
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.feedback import Factor, prepare, request_for, solve_weight
from halfbyte.methods import Hessian, Method, Optimal
from halfbyte.quantize import quantize
from halfbyte.smoothing import Smoothing
from halfbyte.statistics import LinearStatistics, Statistics, open_statistics

MOMENTS = ("second_moment", "blocks", "diagonal", "cross_moment")
KEPT = 4
"""Factors that are kept at once: the inputs of the modules that workers are at."""


class Calibrator:
    """Quantizes pieces with the statistics of their modules. Safe to use from several threads."""

    def __init__(self, planned: Calibrated, engine: Engine, smoothing: Smoothing | None = None) -> None:
        self.planned, self.engine = planned, engine
        self._columns = {} if smoothing is None else smoothing.columns
        self._statistics: Statistics = open_statistics(planned.path)
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, bytes], tuple[threading.Lock, list[Factor | Method]]] = OrderedDict()

    def blocks(self, unit: Unit, piece: Piece, values: npt.NDArray[Any], amax: np.float32 | None) -> tuple[U8, U8]:
        """Packed codes and scale bytes of a piece."""
        format, contract = self.engine.format, self.engine.contract
        if format is None or contract is None:
            raise TypeError("this conversion decodes")
        matrix = np.ascontiguousarray(widen(values))
        name = self.planned.names[unit.module][piece.source]
        if name is None:
            q = quantize(matrix, format, contract, self.engine.method, global_amax=amax, threads=1)
            return np.asarray(q.codes), np.asarray(q.scales)
        width = matrix.shape[1]
        if self.planned.kind == "gptq":
            factor = self._found(name, unit.module, width, lambda known: self._factor(known, unit.module))
            if not isinstance(factor, Factor):
                raise TypeError("gptq needs a factor")
            request = request_for(format, contract, 1)
            q = solve_weight(matrix, factor, request, global_amax=amax, backend="auto", name=unit.module)
        else:
            method = self._found(name, unit.module, width, self._method)
            if isinstance(method, Factor):
                raise TypeError("hessian needs a method")
            q = quantize(matrix, format, contract, method, global_amax=amax, threads=1)
        return np.asarray(q.codes), np.asarray(q.scales)

    def _found(
        self, name: str, module: str, width: int, make: Callable[[LinearStatistics], Factor | Method]
    ) -> Factor | Method:
        """What is made of the statistics of a name, once for all that share their input."""
        exponents = self._columns.get(module)
        key = self._statistics.stored_as(name) or name, b"" if exponents is None else exponents.tobytes()
        with self._lock:
            own, made = self._kept.setdefault(key, (threading.Lock(), []))
            self._kept.move_to_end(key)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        with own:
            if not made:
                try:
                    known = self._statistics.get(name, width, MOMENTS)
                except HalfbyteError as error:
                    raise CheckpointError(str(error)) from error
                if known is None:
                    raise CheckpointError(f"{self.planned.path}: the statistics of {name} are gone")
                made.append(make(known if exponents is None else known.divided(exponents)))
        return made[0]

    def _factor(self, known: LinearStatistics, module: str) -> Factor:
        if self.engine.format is None:
            raise TypeError("this conversion decodes")
        return prepare(
            known.second_moment,
            self.engine.format.block,
            self.planned.method,
            cross_moment=known.cross_moment,
            name=f"{self.planned.path}: second moments of {module}",
        )

    def _method(self, known: LinearStatistics) -> Method:
        """Hessian by the blocks of the second moments; by their diagonal where no more is known."""
        block = 16 if self.engine.format is None else self.engine.format.block
        if known.second_moment is not None:
            return Hessian(_blocks(known.second_moment, block))
        if known.blocks is not None:
            return Hessian(_joined(known.blocks, block))
        diagonal = known.diagonal
        if diagonal is None or not diagonal.any():
            return Optimal()
        return Optimal(diagonal)


def _blocks(moments: F32, block: int) -> F32:
    """The blocks on the diagonal. A block of dead inputs counts every square alike."""
    count = len(moments) // block
    at = np.arange(count)
    found = moments.reshape(count, block, count, block)[at, :, at, :]
    return _usable((found + found.swapaxes(1, 2)) / 2)


def _joined(blocks: F32, block: int) -> F32:
    """Blocks of 16 as blocks of that length; what lies between two of them is not known and counts as zero."""
    parts, size = block // blocks.shape[1], blocks.shape[1]
    found = np.zeros((len(blocks) // parts, block, block), np.float32)
    for part in range(parts):
        found[:, part * size : (part + 1) * size, part * size : (part + 1) * size] = blocks[part::parts]
    return _usable((found + found.swapaxes(1, 2)) / 2)


def _usable(found: npt.NDArray[Any]) -> F32:
    empty = ~found.any(axis=(1, 2))
    found[empty] = np.eye(found.shape[1], dtype=np.float32)
    return np.asarray(found, np.float32)


class SolvedCodes:
    """Codes and scales of pieces from a folder of solved weights."""

    def __init__(self, planned: Solved, engine: Engine) -> None:
        self.planned, self.engine = planned, engine
        self._folder = SolvedFolder(planned.path)
        if self._folder.digest != planned.digest:
            raise CheckpointError(f"{planned.path} has changed since the plan was made; plan again")

    def blocks(self, unit: Unit, piece: Piece, values: npt.NDArray[Any], amax: np.float32 | None) -> tuple[U8, U8]:
        """Packed codes and scale bytes of a piece. The amax must be the one that they were decided with."""
        if self.engine.format is None:
            raise TypeError("this conversion decodes")
        name, source = self.planned.names[unit.module][piece.source], unit.sources[piece.source]
        if amax is not None:
            used = self.engine.usable_amax(self._folder.amax(name), unit.module)
            if used != amax:
                raise CheckpointError(
                    f"{self.planned.path}: {name} was solved with the amax {used:g}, but the weights that share its "
                    f"tensor scale have {amax:g}; they belong to other weights, or share it with others"
                )
        shape = (source.rows, source.columns)
        return self._folder.rows(name, shape, piece.start, piece.stop, self.engine.format)
