"""GPUs that solve modules with statistics: each takes one piece after the other, and keeps the factors of its inputs.

The factor of an input is made on the GPU, where its last bits may differ from the CPU's. What is solved with a factor
has the bits of the CPU, however rows are cut: so neither workers, nor memory, nor the number of GPUs of one kind change
a byte. Hessian objectives are made on the CPU, and give its bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np

from halfbyte.checkpoint.execute.device.protocol import DeviceMemoryError
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.factors import Kept, Need
from halfbyte.checkpoint.execute.solving import Source, formats_of, method_of, widths_of
from halfbyte.checkpoint.plan.types import Calibrated, Plan
from halfbyte.codec.bits import F32, U8
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.feedback import Factor, factor_memory_on_device
from halfbyte.methods import Gptq, Method
from halfbyte.statistics import LinearStatistics

T = TypeVar("T")

LEAST_ROWS = 256
"""Rows that are solved at once at least, where there are as many."""

ROW = 32
"""Bytes of GPU memory per element that is solved: its values, target, update and error, and what sorts them."""


class Card(Protocol):
    """A GPU. Everything but `free` may raise DeviceMemoryError, and is asked from one thread."""

    name: str

    def free(self) -> int:
        """Bytes of memory that nobody uses."""

    def begin(self, limit: int | None) -> None:
        """Called by the thread before anything else. limit: bytes that it may take in all."""

    def factor(self, known: LinearStatistics, block: int, method: Gptq, name: str) -> Factor: ...

    def solve(self, values: F32, factor: Factor, amax: np.float32 | None, name: str) -> tuple[U8, U8]: ...

    def quantize(self, values: F32, method: Method, amax: np.float32 | None) -> tuple[U8, U8]: ...

    def release(self) -> None:
        """Give back memory that nothing is in."""

    def end(self) -> None:
        """The thread has ended."""


class CardSolver:
    """Solves on GPUs."""

    def __init__(self, plan: Plan, engine: Engine, cards: Sequence[Card], limit: int | None) -> None:
        """limit: bytes per GPU; None: half of what is free, or what the largest factor needs."""
        if plan.calibrated is None:
            raise TypeError("only plans with statistics are solved")
        self.planned, self.cards = plan.calibrated, tuple(cards)
        self.format, _ = formats_of(engine)
        budgets = [budget_of(card, self.planned, widths_of(plan), limit) for card in cards]
        self.kept: list[Kept[Any]] = [Kept(budget) for budget in budgets]
        self._threads = [ThreadPoolExecutor(1, f"halfbyte-{card.name}", card.begin, (limit,)) for card in self.cards]
        self._place: dict[Hashable, int] = {}
        self._load = [0] * len(self.cards)
        self._lock = threading.Lock()

    def gptq(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        return self._on_card(source, values.size, lambda number: self._gptq(number, values, source, amax))

    def hessian(self, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        return self._on_card(source, values.size, lambda number: self._hessian(number, values, source, amax))

    def close(self) -> None:
        for thread, kept, card in zip(self._threads, self.kept, self.cards, strict=True):
            thread.shutdown()
            kept.clear()
            card.end()

    def _on_card(self, source: Source, size: int, job: Callable[[int], T]) -> T:
        """Run a job on the GPU that has the factor, or on the one that had the least to do so far."""
        with self._lock:
            number = self._place.get(source.key)
            if number is None:
                number = self._place[source.key] = min(range(len(self.cards)), key=lambda i: (self._load[i], i))
            self._load[number] += size * source.width
        return self._threads[number].submit(job, number).result()

    def _gptq(self, number: int, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        card, kept = self.cards[number], self.kept[number]
        need = card_need(self.planned, source.width)
        with kept.borrow(source.key, need, lambda: self._factor(number, source)) as factor:
            room = kept.memory - kept.used
            return self._in_parts(
                values, room, source, lambda rows: card.solve(values[rows], factor, amax, source.module)
            )

    def _hessian(self, number: int, values: F32, source: Source, amax: np.float32 | None) -> tuple[U8, U8]:
        card, kept = self.cards[number], self.kept[number]
        make = lambda: method_of(self.planned, source, self.format.block)  # noqa: E731
        with kept.borrow(source.key, card_need(self.planned, source.width), make) as method:
            room = kept.memory - kept.used
            return self._in_parts(values, room, source, lambda rows: card.quantize(values[rows], method, amax))

    def _factor(self, number: int, source: Source) -> Factor:
        card, known = self.cards[number], source.read()
        name = f"{self.planned.path}: second moments of {source.module}"
        try:
            return card.factor(known, self.format.block, self.planned.method, name)
        except DeviceMemoryError:
            self.kept[number].clear()
            card.release()
        try:
            return card.factor(known, self.format.block, self.planned.method, name)
        except DeviceMemoryError as error:
            raise _full(card, source) from error

    def _in_parts(self, values: F32, room: int, source: Source, job: Callable[[slice], tuple[U8, U8]]) -> tuple[U8, U8]:
        """A job on as many rows at a time as there is memory for."""
        most = max(LEAST_ROWS, room // (ROW * source.width))
        found: list[tuple[U8, U8]] = []
        start = 0
        while start < len(values):
            try:
                found.append(job(slice(start, start + most)))
                start += most
            except DeviceMemoryError as error:
                if most <= 1:
                    raise _full(self.cards[self._place[source.key]], source) from error
                self.cards[self._place[source.key]].release()
                most = -(-most // 2)
        codes, scales = zip(*found, strict=True)
        return np.concatenate(codes), np.concatenate(scales)


def _full(card: Card, source: Source) -> CheckpointError:
    return CheckpointError(
        f"{source.module}: device {card.name} has no memory left for the factor of {source.width:,} inputs; free some, "
        "choose another device, or begin anew with --device cpu"
    )


def card_need(planned: Calibrated, width: int) -> Need:
    """Bytes of GPU memory for what one input is solved with."""
    if planned.kind == "hessian":
        return Need(1024 * width, 1024 * width)
    making, held = factor_memory_on_device(width, planned.crossed)
    return Need(making, held)


def budget_of(card: Card, planned: Calibrated, widths: set[int], limit: int | None) -> int:
    """Bytes of a GPU for factors and rows; refuses one that has too few for the largest factor."""
    width = max(widths, default=0)
    need = card_need(planned, width).making + LEAST_ROWS * ROW * width
    if limit is not None and limit < need:
        raise InputError(
            f"--max-gpu-memory {limit:,} is too little: the factor of {width:,} inputs needs {need:,} while it is "
            "made; or use --device cpu"
        )
    free = card.free()
    if free < need:
        raise UnsupportedError(
            f"device {card.name} has {free:,} bytes free, and the factor of {width:,} inputs needs {need:,} "
            "while it is made; free some, choose another device, or use --device cpu"
        )
    return min(free * 9 // 10, limit) if limit is not None else max(need, free // 2)
