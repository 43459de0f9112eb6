"""Which device `auto` takes: the faster one, by a rule that costs less than it can gain.

Reading, hashing and writing take the same time either way. A GPU saves the time in which the CPU would compute, and
costs the time to start: importing torch, a CUDA context, loading kernels. The first is estimated from a short timing of
the CPU's own kernel, the second is a constant.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halfbyte.backends.threads import thread_count
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.target_device import CPU, cuda_count, driver_present, kernel_reason
from halfbyte.checkpoint.io.views import NUMPY
from halfbyte.checkpoint.plan.types import Plan

START = 6.0
"""Seconds until a GPU computes: importing torch, a context, loading kernels that were compiled before."""

PROBE = (256, 1024)
"""Shape of the matrix whose quantization is timed: about a millisecond."""


@dataclass(frozen=True)
class Choice:
    """A device, and why it was taken; the reason completes "on cpu: …"."""

    device: str
    reason: str


def choose_device(plan: Plan, workers: int | None, timing: Callable[[Plan], float] | None = None) -> Choice:
    """The device for a plan. `timing`: seconds in which one worker computes the plan; for tests."""
    if all(unit.action != "quantize" for unit in plan.units):
        return Choice(CPU, "nothing is quantized")
    if not driver_present():
        return Choice(CPU, "there is no NVIDIA driver")
    if (reason := kernel_reason(plan)) is not None:
        return Choice(CPU, f"GPUs cannot do this: {reason}")
    threads = thread_count(workers)
    saved = (timing or cpu_seconds)(plan) / threads
    if saved <= START:
        return Choice(
            CPU, f"{threads} workers compute this in about {saved:.1f} s, and a GPU needs {START:.0f} s to start"
        )
    count = cuda_count()
    if isinstance(count, str):
        return Choice(CPU, f"torch cannot use a GPU (device cuda{count})")
    return Choice("cuda", f"this saves {threads} workers about {saved:.0f} s of computing each")


def cpu_seconds(plan: Plan) -> float:
    """Seconds in which one thread of the CPU would quantize everything, from a short timing of its kernel."""
    engine = Engine(plan.format, plan.contract, plan.method, plan.repairs)
    elements: dict[str, int] = {}
    for unit in plan.units:
        for source in unit.sources if unit.action == "quantize" else ():
            name = source.weight.dtype if source.kind == "float" else "F32"
            elements[name] = elements.get(name, 0) + source.rows * source.columns
    return sum(count * _seconds_each(engine, name) for name, count in elements.items())


def _seconds_each(engine: Engine, dtype: str) -> float:
    """Seconds per element: the best of three calls, of which the first may build tables."""
    x = (np.random.default_rng(0).standard_normal(PROBE) * 0.02).astype(np.float32).astype(NUMPY[dtype])
    amax = engine.amax(x)
    given = amax if engine.format is not None and engine.format.has_global else None
    codes, scales = (np.empty((PROBE[0], width), np.uint8) for width in engine.widths(PROBE[1]))
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        engine.quantize(x, given, codes, scales)
        best = min(best, time.perf_counter() - began)
    return best / x.size
