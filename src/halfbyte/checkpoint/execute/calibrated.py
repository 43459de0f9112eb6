"""Codes of a plan's modules by their statistics, or read from a folder of solved weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.headroom import widened
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.pieces import Piece
from halfbyte.checkpoint.execute.solving import Solver, Source, formats_of
from halfbyte.checkpoint.io.solved import SolvedFolder
from halfbyte.checkpoint.plan.types import Calibrated, Solved, Unit
from halfbyte.codec.bits import U8, widen
from halfbyte.errors import CheckpointError, HalfbyteError
from halfbyte.quantize import quantize
from halfbyte.smoothing import Smoothing
from halfbyte.statistics import LinearStatistics, Statistics, open_statistics

MOMENTS = ("second_moment", "blocks", "diagonal", "cross_moment")


class Calibrator:
    """Quantizes pieces with the statistics of their modules. Safe to use from several threads."""

    def __init__(self, planned: Calibrated, engine: Engine, solver: Solver, smoothing: Smoothing | None = None) -> None:
        self.planned, self.engine, self.solver = planned, engine, solver
        self._columns = {} if smoothing is None else smoothing.columns
        self._statistics: Statistics = open_statistics(planned.path)

    def blocks(self, unit: Unit, piece: Piece, values: npt.NDArray[Any], amax: np.float32 | None) -> tuple[U8, U8]:
        """Packed codes and scale bytes of a piece."""
        format, contract = formats_of(self.engine)
        matrix = np.ascontiguousarray(widen(values))
        name = self.planned.names[unit.module][piece.source]
        if name is None:
            q = quantize(matrix, format, contract, self.engine.method, global_amax=amax, threads=1)
            return np.asarray(q.codes), np.asarray(q.scales)
        solve = self.solver.gptq if self.planned.kind == "gptq" else self.solver.hessian
        return solve(matrix, self._source(name, unit.module, matrix.shape[1]), amax)

    def _source(self, name: str, module: str, width: int) -> Source:
        """The statistics of a name as the module's inputs have them, divided by its factors of smoothing."""
        exponents = self._columns.get(module)
        key = self._statistics.stored_as(name) or name, b"" if exponents is None else exponents.tobytes()

        def read() -> LinearStatistics:
            try:
                known = self._statistics.get(name, width, MOMENTS)
            except HalfbyteError as error:
                raise CheckpointError(str(error)) from error
            if known is None:
                raise CheckpointError(f"{self.planned.path}: the statistics of {name} are gone")
            return known if exponents is None else known.divided(exponents)

        return Source(key, width, read, module)


class SolvedCodes:
    """Codes and scales of pieces from a folder of solved weights."""

    def __init__(self, planned: Solved, engine: Engine) -> None:
        self.planned, self.engine = planned, engine
        self._folder = SolvedFolder(planned.path)
        if self._folder.digest != planned.digest:
            raise CheckpointError(f"{planned.path} has changed since the plan was made; plan again")

    def amax(self, units: Sequence[Unit], own: np.float32, usable: np.float32) -> np.float32:
        """The amax that the codes of units with one tensor scale were decided with: theirs, times a headroom.

        own: the largest magnitude of all of them. usable: what it becomes where it has no scale.
        """
        said = self._folder.headroom
        tried = self.engine.usual_headrooms() if said is None else said
        known = {self.engine.usable_amax(np.float32(widened(own, h)), units[0].module) for h in tried} | {usable}
        found = set()
        for unit in units:
            for name in self.planned.names[unit.module]:
                used = self.engine.usable_amax(self._folder.amax(name), unit.module)
                found.add(used)
                if used not in known or len(found) > 1:
                    raise CheckpointError(
                        f"{self.planned.path}: {name} was solved with the amax {used:g}, but the weights that share "
                        f"its tensor scale have {own:g}, and no headroom in common that makes it {used:g}; they belong "
                        "to other weights, or share it with others"
                    )
        return found.pop()

    def blocks(self, unit: Unit, piece: Piece, values: npt.NDArray[Any], amax: np.float32 | None) -> tuple[U8, U8]:
        """Packed codes and scale bytes of a piece."""
        if self.engine.format is None:
            raise TypeError("this conversion decodes")
        name, source = self.planned.names[unit.module][piece.source], unit.sources[piece.source]
        shape = (source.rows, source.columns)
        return self._folder.rows(name, shape, piece.start, piece.stop, self.engine.format)
