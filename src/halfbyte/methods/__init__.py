"""How the scale of a block is chosen. A method is only data: the contract defines the arithmetic, a backend computes.

To add a method, write a file with a frozen dataclass and add a line to METHODS.
"""

from __future__ import annotations

from halfbyte.errors import unknown_name
from halfbyte.methods.amax import Amax
from halfbyte.methods.four_six import FourSix
from halfbyte.methods.hessian import Hessian, hessian_from_activations
from halfbyte.methods.optimal import Optimal
from halfbyte.methods.spec import Method
from halfbyte.methods.sweep import Sweep

METHODS: dict[str, type[Method]] = {method.name: method for method in (Amax, FourSix, Sweep, Optimal, Hessian)}

__all__ = [
    "METHODS",
    "Amax",
    "FourSix",
    "Hessian",
    "Method",
    "Optimal",
    "Sweep",
    "check_method_name",
    "hessian_from_activations",
]


def check_method_name(name: str) -> type[Method]:
    """The method class of that name. An unknown name raises an error that lists the known ones."""
    if name not in METHODS:
        raise unknown_name("method", name, METHODS)
    return METHODS[name]
