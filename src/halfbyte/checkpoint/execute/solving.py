"""Who computes the codes of modules with statistics: the processor here, GPUs in device/cards.py."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.factors import Kept, Need
from halfbyte.checkpoint.plan.types import Calibrated, Plan
from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import Contract
from halfbyte.errors import InputError
from halfbyte.feedback import Factor, factor_memory, prepare, request_for, solve_weight
from halfbyte.formats import BlockFormat
from halfbyte.methods import Hessian, Method, Optimal
from halfbyte.quantize import quantize
from halfbyte.statistics import LinearStatistics

SPARE = 3
"""Factors for which there is memory beside the one in the making, where nobody says how much there is."""


@dataclass(frozen=True)
class Source:
    """Where a factor comes from."""

    key: Hashable
    """Equal for all that share it."""
    width: int
    read: Callable[[], LinearStatistics]
    module: str
    """The one that asks, for errors."""


class Solver(Protocol):
    """Packed codes and scale bytes of (rows, K) float32 values, however they are cut into pieces."""

    def gptq(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]: ...

    def hessian(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]: ...

    def close(self) -> None:
        """Give back what is kept."""


class HostSolver:
    """Solves on the processor."""

    def __init__(self, planned: Calibrated, engine: Engine, memory: int) -> None:
        self.planned = planned
        self.format, self.contract = formats_of(engine)
        self.kept: Kept[Any] = Kept(memory)

    def gptq(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        with self.kept.borrow(source.key, factor_need(self.planned, source.width), lambda: self._factor(source)) as one:
            request = request_for(self.format, self.contract, 1)
            q = solve_weight(values, one, request, global_amax=amax, backend="auto", name=source.module)
        return np.asarray(q.codes), np.asarray(q.scales)

    def _factor(self, source: Source) -> Factor:
        known = source.read()
        name = f"{self.planned.path}: second moments of {source.module}"
        return prepare(
            known.second_moment, self.format.block, self.planned.method, cross_moment=known.cross_moment, name=name
        )

    def hessian(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        need = method_need(self.planned, source.width)
        with self.kept.borrow(source.key, need, lambda: method_of(self.planned, source, self.format.block)) as method:
            q = quantize(values, self.format, self.contract, method, global_amax=amax, threads=1)
        return np.asarray(q.codes), np.asarray(q.scales)

    def close(self) -> None:
        self.kept.clear()


def formats_of(engine: Engine) -> tuple[BlockFormat, Contract]:
    if engine.format is None or engine.contract is None:
        raise TypeError("this conversion decodes")
    return engine.format, engine.contract


# --- memory ---


def factor_need(planned: Calibrated, width: int) -> Need:
    """Bytes on the host for the factor of one input, made there."""
    making, held = factor_memory(width, planned.crossed, planned.method.descent)
    return Need(making, held)


def method_need(planned: Calibrated, width: int) -> Need:
    """Bytes on the host for the objective of one input: blocks, cut from what is read."""
    return Need(statistics_bytes(planned, width) + 1024 * width, 512 * width)


def statistics_bytes(planned: Calibrated, width: int) -> int:
    """Bytes of the statistics of one input while they are read, and divided by the factors of smoothing."""
    return 2 * (2 if planned.crossed else 1) * 4 * width * width


def widths_of(plan: Plan) -> set[int]:
    """The inputs of modules that take statistics."""
    names = {} if plan.calibrated is None else plan.calibrated.names
    return {
        source.columns
        for unit in plan.units
        if unit.action == "quantize" and unit.module in names
        for source, name in zip(unit.sources, names[unit.module], strict=True)
        if name is not None
    }


def memory_of(plan: Plan, cards: int) -> tuple[int, int]:
    """Bytes on the host that factors need at least, and those that are useful. cards: GPUs that make them, or 0."""
    planned = plan.calibrated
    if planned is None:
        return 0, 0
    if cards:
        least = max((statistics_bytes(planned, width) for width in widths_of(plan)), default=0)
        return cards * least, cards * least
    need = factor_need if planned.kind == "gptq" else method_need
    needs = [need(planned, width) for width in widths_of(plan)]
    least = max((one.making for one in needs), default=0)
    return least, least + SPARE * max((one.held for one in needs), default=0)


def share_memory(plan: Plan, limit: int | None, default: int, cards: int) -> tuple[int, int]:
    """Bytes for the buffers of workers, and for factors. limit: for both; None: `default` for the buffers alone."""
    least, useful = memory_of(plan, cards)
    if limit is None:
        return default, useful
    factors = max(least, min(useful, limit // 2))
    if factors >= limit:
        raise InputError(
            f"--max-memory {limit:,} is too little: the largest factor of the statistics needs {least:,} while it is "
            "made, and the buffers come on top"
        )
    return limit - factors, factors


# --- the objective of `hessian` ---


def method_of(planned: Calibrated, source: Source, block: int) -> Method:
    """The objective of one input. What is wrong with its statistics is said with the name of the module."""
    try:
        return objective_of(source.read(), block, planned.codes)
    except InputError as error:
        raise InputError(f"{planned.path}: second moments of {source.module}: {error}") from error


def objective_of(known: LinearStatistics, block: int, codes: Literal["nearest", "descent"]) -> Method:
    """Hessian by the blocks of the second moments; by their diagonal where no more is known."""
    if known.second_moment is not None:
        return Hessian(_blocks(known.second_moment, block), codes)
    if known.blocks is not None:
        return Hessian(_joined(known.blocks, block), codes)
    diagonal = known.diagonal
    if diagonal is None or not diagonal.any():
        return Optimal()
    return Optimal(_counted(diagonal, block))


def _counted(diagonal: F32, block: int) -> F32:
    """A block of dead inputs counts every square alike, as little as the input that counts least."""
    counted = diagonal.copy()
    blocks = counted.reshape(-1, block)
    blocks[~blocks.any(axis=1)] = diagonal[diagonal > 0].min()
    return counted


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
