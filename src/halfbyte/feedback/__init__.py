"""GPTQ: weights whose rounding errors are fed back through the second moments of a layer's inputs (docs/gptq.md)."""

from halfbyte.feedback.api import gptq, request_for, solve_weight
from halfbyte.feedback.factor import Factor, factor_memory, factor_memory_on_device, prepare

__all__ = [
    "Factor",
    "factor_memory",
    "factor_memory_on_device",
    "gptq",
    "prepare",
    "request_for",
    "solve_weight",
]
