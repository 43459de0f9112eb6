"""Running a model layer by layer: statistics of its linear layers (`halfbyte calibrate`), sequential GPTQ, and eval.

`tokens` cuts texts into windows, `weights` reads a checkpoint of any layout, `layered` builds the model without weights
and lends memory to one layer at a time, `watch` sees what goes into linear layers, `moments` sums it up. torch and
transformers are loaded when one of the functions is used first.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from halfbyte.errors import UnsupportedError

if TYPE_CHECKING:
    from halfbyte.calibration.collect import calibrate
    from halfbyte.calibration.evaluation import evaluate
    from halfbyte.calibration.sequential import solve_sequentially
    from halfbyte.calibration.smooth import fit_smoothing, smoothing_origin
    from halfbyte.calibration.tokens import read_windows

__all__ = ["calibrate", "evaluate", "fit_smoothing", "read_windows", "smoothing_origin", "solve_sequentially"]

HOMES = {
    "calibrate": "collect",
    "evaluate": "evaluation",
    "fit_smoothing": "smooth",
    "read_windows": "tokens",
    "smoothing_origin": "smooth",
    "solve_sequentially": "sequential",
}


def __getattr__(name: str) -> Any:
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "transformers"):
            raise
        raise UnsupportedError(f"{name} needs {error.name}; install halfbyte[calibrate]") from error
