"""halfbyte: tensors and checkpoints in 4-bit floating point, bit for bit."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from halfbyte import calibration as calibration
    from halfbyte import checkpoint as checkpoint
    from halfbyte import contracts
    from halfbyte import gpu as gpu
    from halfbyte import layouts as layouts
    from halfbyte import online as online
    from halfbyte import statistics as statistics
    from halfbyte import testing as testing
    from halfbyte import verify as verify
    from halfbyte.casting import CastReport, cast
    from halfbyte.errors import HalfbyteError, InputError, UnknownNameError, UnsupportedError
    from halfbyte.feedback import gptq
    from halfbyte.formats import FORMATS, get_format
    from halfbyte.methods import METHODS, Amax, FourSix, Gptq, Hessian, Optimal, Sweep, hessian_from_activations
    from halfbyte.quantization_error import QuantizationError, error
    from halfbyte.quantize import dequantize, quantize
    from halfbyte.saved import load
    from halfbyte.search import search_global_scale
    from halfbyte.straight_through import fake_quant
    from halfbyte.types import QuantizedTensor

__version__ = "0.2.0"

__all__ = [
    "FORMATS",
    "METHODS",
    "Amax",
    "CastReport",
    "FourSix",
    "Gptq",
    "HalfbyteError",
    "Hessian",
    "InputError",
    "Optimal",
    "QuantizationError",
    "QuantizedTensor",
    "Sweep",
    "UnknownNameError",
    "UnsupportedError",
    "cast",
    "contracts",
    "dequantize",
    "error",
    "fake_quant",
    "get_format",
    "gptq",
    "hessian_from_activations",
    "load",
    "quantize",
    "search_global_scale",
]

HOMES = {
    "casting": ("CastReport", "cast"),
    "errors": ("HalfbyteError", "InputError", "UnknownNameError", "UnsupportedError"),
    "feedback": ("gptq",),
    "formats": ("FORMATS", "get_format"),
    "quantization_error": ("QuantizationError", "error"),
    "methods": ("METHODS", "Amax", "FourSix", "Gptq", "Hessian", "Optimal", "Sweep", "hessian_from_activations"),
    "quantize": ("dequantize", "quantize"),
    "saved": ("load",),
    "search": ("search_global_scale",),
    "straight_through": ("fake_quant",),
    "types": ("QuantizedTensor",),
}
"""The module of each public name. It is loaded when the name is first used, so that importing halfbyte costs little."""

MODULES = (
    "arrays", "backends", "calibration", "checkpoint", "codec", "contracts", "gpu", "layouts", "on_device", "online",
    "request", "statistics", "testing", "torch_ops", "verify", *HOMES,
)  # fmt: skip
"""Modules that are attributes of the package without an import of their own."""


class _Package(ModuleType):
    """The package: it finds its public names when they are asked for."""

    def __getattr__(self, name: str) -> object:
        home = next((module for module, names in HOMES.items() if name in names), None)
        if home is None and name not in MODULES:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        with importlib.import_module(f"{self.__name__}.subnormals").subnormals_kept():  # tables are made on import
            module = importlib.import_module(f"{self.__name__}.{home or name}")
        found: object = module if home is None else getattr(module, name)
        super().__setattr__(name, found)
        return found

    def __setattr__(self, name: str, value: object) -> None:
        # An import of the module `quantize` would put it in the place of the function.
        if not (name == "quantize" and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
