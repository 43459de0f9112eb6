"""Which device `auto` takes: the faster one, by a rule that costs less than it can gain.

A worker reads, hashes and writes in the same time either way. On the CPU it computes besides, for a time that is
estimated from a short timing of the kernel; a GPU computes meanwhile, but needs time to start. Beyond a certain speed
more workers help neither: they wait for memory and for each other. The constants were measured with 16 GB of BF16
experts from the page cache on a machine with 16 processors and an H200.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from halfbyte.backends.threads import thread_count
from halfbyte.checkpoint.execute.device.solving_time import work_of
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.target_device import (
    CPU,
    cuda_count,
    driver_present,
    kernel_reason,
    numbers_of,
    resolve_device,
)
from halfbyte.checkpoint.io.views import NUMPY
from halfbyte.checkpoint.plan.types import Plan

START = 5.0
"""Seconds until a GPU computes: importing torch and a context took 3.2 to 4.1, loading compiled kernels the rest."""

MOVING = 1 / 2.15e9
"""Seconds in which a worker reads a byte of source and hashes and writes what is made of it: one worker on the GPU."""

FASTEST = 1 / 10.5e9
"""Seconds per byte of source that many workers come down to, on the CPU (optimal) as on the GPU."""

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
    size = sum(unit.source_bytes for unit in plan.units if unit.action == "quantize")
    if plan.calibrated is not None:
        work = work_of(plan)
        on_cpu = MOVING * size / threads + work.on_cpu(threads)
        on_gpu = MOVING * size / threads + work.on_gpu() + START
    else:
        on_cpu = max((MOVING * size + (timing or cpu_seconds)(plan)) / threads, FASTEST * size)
        on_gpu = max(MOVING * size / threads, FASTEST * size) + START
    estimate = f"about {on_cpu:.0f} s on the CPU, {on_gpu:.0f} s on a GPU, of which {START:.0f} to start"
    if on_cpu <= on_gpu:
        return Choice(CPU, estimate)
    count = cuda_count()
    if isinstance(count, str):
        return Choice(CPU, f"torch cannot use a GPU (device cuda{count})")
    return Choice("cuda", estimate)


def choose_for_model(device: str) -> Choice:
    """Where a model runs, and its weights are solved: one device. A GPU is always the faster."""
    if device != "auto":
        numbers = numbers_of(resolve_device(device))
        return Choice(f"cuda:{numbers[0]}" if numbers else CPU, "")
    if not driver_present():
        return Choice(CPU, "there is no NVIDIA driver")
    count = cuda_count()
    if isinstance(count, str):
        return Choice(CPU, f"torch cannot use a GPU (device cuda{count})")
    return Choice("cuda:0", "a GPU runs a model many times faster")


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
