"""Weights with NaN or Inf, which have no scale: all are found in one run, and named together at its end."""

from __future__ import annotations

import shlex
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.plan.types import Unit
from halfbyte.codec.bits import U8
from halfbyte.errors import CheckpointError
from halfbyte.models.names import routed_layer


@dataclass(frozen=True)
class Bad:
    """What was found in one module."""

    total: int
    """Values in the module, or scales."""
    stacked: bool
    first: tuple[int, int, int]
    """Matrix (of stacked experts), row, and column or block."""
    nan: int = 0
    inf: int = 0
    scales: int = 0
    """E8M0 scales that are NaN."""

    def __str__(self) -> str:
        matrix, row, column = self.first
        place = f"row {row}, {'block' if self.scales else 'column'} {column}"
        if self.stacked:
            place = f"expert {matrix}, {place}"
        if self.scales:
            return f"has E8M0 scales of 255, which is NaN ({self.scales:,} of {self.total:,}, the first at {place})"
        words = " and ".join(word for word, count in (("NaN", self.nan), ("Inf", self.inf)) if count)
        counts = " + ".join(f"{count:,}" for count in (self.nan, self.inf) if count)
        return f"holds {words} ({counts} of {self.total:,} values, the first at {place})"


class BadModules:
    """Collects what the workers find. Pieces come in any order, and a piece may come twice."""

    def __init__(self) -> None:
        self._found: dict[str, dict[tuple[int, int, int], Bad]] = {}
        self._lock = threading.Lock()

    def add_values(self, unit: Unit, source: int, start: int, values: npt.NDArray[Any]) -> None:
        """Note the NaNs and Infs of some rows, which begin at row `start` of a source of the unit."""
        nan, inf = np.isnan(values), np.isinf(values)
        total = sum(one.rows * one.columns for one in unit.sources)
        first = _first(source, start, nan | inf)
        self._add(unit, Bad(total, len(unit.sources) > 1, first, nan=int(nan.sum()), inf=int(inf.sum())))

    def add_scales(self, unit: Unit, source: int, start: int, scales: U8) -> None:
        """Note the E8M0 scales of some rows that are NaN."""
        wrong = scales == 255
        total = scales.shape[1] * sum(one.rows for one in unit.sources)
        first = _first(source, start, wrong)
        self._add(unit, Bad(total, len(unit.sources) > 1, first, scales=int(wrong.sum())))

    def _add(self, unit: Unit, bad: Bad) -> None:
        with self._lock:
            self._found.setdefault(unit.module, {})[bad.first] = bad

    @property
    def modules(self) -> dict[str, Bad]:
        """Module → all that was found in it, in the order of the names."""
        result = {}
        for module, pieces in sorted(self._found.items()):
            parts = [bad for _, bad in sorted(pieces.items())]
            result[module] = replace(
                parts[0],
                nan=sum(part.nan for part in parts),
                inf=sum(part.inf for part in parts),
                scales=sum(part.scales for part in parts),
            )
        return result

    def refuse(self) -> None:
        """Raise if anything was found: every module, and the options that keep them."""
        refuse(self.modules)


def refuse(found: Mapping[str, Bad]) -> None:
    """Raise if there is a module that has no usable scale."""
    if not found:
        return
    lines = "\n".join(f"  {module} {bad}" for module, bad in sorted(found.items()))
    keep = dict.fromkeys(f"--keep {shlex.quote(keep_pattern(module))}" for module in sorted(found))
    count = f"{len(found)} modules have" if len(found) > 1 else "1 module has"
    raise CheckpointError(
        f"{count} no usable scale:\n{lines}\nRepair the source, or add to the same command: {' '.join(keep)}\n"
        "Shards that do not change by this are finished and will be used again."
    )


def _first(source: int, start: int, where: npt.NDArray[np.bool_]) -> tuple[int, int, int]:
    row, column = divmod(int(where.argmax()), where.shape[1])
    return source, start + row, column


def keep_pattern(module: str) -> str:
    """The pattern that keeps a module; for an expert, all of its layer, because servers want them alike."""
    layer = routed_layer(module)
    return module if layer is None else f"{layer}.*"
