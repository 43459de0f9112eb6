"""How long a conversion by statistics takes: on so many processors, and on a GPU.

SEARCH and TERM were measured on one core with AVX-512; TURN on an H200, from 14 layers of SmolLM2 in 3.5 s. The others
are estimates from the speed of such machines.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.checkpoint.plan.types import Plan
from halfbyte.statistics import open_statistics

SEARCH, TERM = 17e-9, 0.021e-9
"""CPU: seconds per element whose scale is searched, and per product that error feedback subtracts."""
FACTOR, PASS = 1 / 25e9, 60e-9
"""CPU: seconds per multiplication of a factor (K³/3 of them), and per number that is read, checked and sorted (K²)."""

TURN = 0.7e-3
"""GPU: seconds per block of a weight that waits for the one before."""
GPU_TERM, GPU_FACTOR, GPU_PASS = 1 / 4e12, 1 / 5e12, 4e-9


@dataclass
class Work:
    """What is to be done, counted."""

    elements: float = 0
    terms: float = 0
    turns: float = 0
    factors: float = 0
    """Multiplications."""
    squares: float = 0
    """Numbers of second moments."""

    def on_cpu(self, threads: int) -> float:
        """Seconds."""
        alone = SEARCH * self.elements + TERM * self.terms + FACTOR * self.factors + PASS * self.squares
        return alone / threads

    def on_gpu(self, count: int = 1) -> float:
        alone = TURN * self.turns + GPU_TERM * self.terms + GPU_FACTOR * self.factors + GPU_PASS * self.squares
        return alone / count


def work_of(plan: Plan) -> Work:
    """The work of the modules with statistics."""
    found = Work()
    if plan.calibrated is None or plan.format is None:
        return found
    statistics, solves = open_statistics(plan.calibrated.path), plan.calibrated.kind == "gptq"
    made: set[str] = set()
    for unit in plan.units:
        names = plan.calibrated.names.get(unit.module, ())
        for source, name in zip(unit.sources, names, strict=False):
            if name is None:
                continue
            width = source.columns
            found.elements += source.rows * width
            key = statistics.stored_as(name) or name
            if key not in made:
                made.add(key)
                found.squares += width * width
                found.factors += width**3 / 3 if solves else 0
            if solves:
                found.terms += source.rows * width * width * (1.5 if plan.calibrated.crossed else 0.5)
                found.turns += width / plan.format.block
    return found
