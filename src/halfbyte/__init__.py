"""halfbyte: tensors and checkpoints in 4-bit floating point, bit for bit."""

from halfbyte import contracts
from halfbyte.casting import CastReport, cast
from halfbyte.errors import HalfbyteError, InputError, UnknownNameError, UnsupportedError
from halfbyte.formats import FORMATS, get_format
from halfbyte.methods import METHODS, Amax, FourSix, Hessian, Optimal, Sweep, hessian_from_activations
from halfbyte.quantize import dequantize, quantize
from halfbyte.search import search_global_scale
from halfbyte.types import QuantizedTensor

__version__ = "0.2.0"

__all__ = [
    "FORMATS",
    "METHODS",
    "Amax",
    "CastReport",
    "FourSix",
    "HalfbyteError",
    "Hessian",
    "InputError",
    "Optimal",
    "QuantizedTensor",
    "Sweep",
    "UnknownNameError",
    "UnsupportedError",
    "cast",
    "contracts",
    "dequantize",
    "get_format",
    "hessian_from_activations",
    "quantize",
    "search_global_scale",
]
