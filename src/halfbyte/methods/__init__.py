"""How the scale of a block is chosen. A method is only data: the contract defines the arithmetic, a backend computes.

To add a method, write a file with a frozen dataclass and add a line to METHODS.
"""

from __future__ import annotations

from typing import Any

from halfbyte.errors import unknown_name
from halfbyte.methods.amax import Amax
from halfbyte.methods.four_six import FourSix
from halfbyte.methods.gptq import Gptq
from halfbyte.methods.hessian import Hessian, hessian_from_activations
from halfbyte.methods.optimal import Optimal
from halfbyte.methods.spec import Method
from halfbyte.methods.spelling import read_spelling, spelled_method
from halfbyte.methods.sweep import Sweep

METHODS: dict[str, type[Method]] = {method.name: method for method in (Amax, FourSix, Sweep, Optimal, Hessian, Gptq)}

__all__ = [
    "METHODS",
    "Amax",
    "FourSix",
    "Gptq",
    "Hessian",
    "Method",
    "Optimal",
    "Sweep",
    "check_method_name",
    "hessian_from_activations",
    "method_from",
    "parse_method",
]


def parse_method(text: str) -> tuple[type[Method], dict[str, Any]]:
    """The class that a spelling such as "four_six:mse:256" names, and the options that it gives (spelling.py).

    >>> parse_method("four_six:mse:256")
    (<class 'halfbyte.methods.four_six.FourSix'>, {'error': 'mse', 'e4m3_max': 256})
    """
    return read_spelling(text, METHODS)


def method_from(method: str | Method, **arrays: Any) -> Method:
    """A method by its spelling, or as it is. Options that are not named have the defaults of the class.

    arrays: what a text cannot hold: `method_from("hessian:descent", h=h)`.

    >>> method_from("four_six:mse:256")
    FourSix(error='mse', e4m3_max=256, fast_error=False)
    """
    if isinstance(method, Method):
        return method
    if not isinstance(method, str):
        raise unknown_name("method", method, METHODS)
    return spelled_method(method, METHODS, **arrays)


def check_method_name(name: str) -> type[Method]:
    """The method class of that name. An unknown name raises an error that lists the known ones."""
    return parse_method(name)[0]
