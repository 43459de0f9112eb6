"""What verify asks of a model, all in one place: the role of a module, its names at run time, the output heads."""

from __future__ import annotations

from halfbyte.models import Model
from halfbyte.models.families import is_lookup_table, is_norm

ROLES = {
    "output head": "head",
    "router": "router",
    "convolution": "convolution",
    "vision or audio tower": "tower",
    "projector": "projector",
}
"""Why a module stays unquantized → its role."""


def role_of(model: Model, module: str) -> str | None:
    """What a module is: linear, table, norm, head, router, tower and so on; None: not known."""
    if is_lookup_table(module):
        return "table"
    if is_norm(module):
        return "norm"
    reason = model.kept(module)
    return "linear" if reason is None else ROLES.get(reason)


def runtime_names(model: Model, module: str) -> tuple[str, ...]:
    """The names of a module of the file in the model that transformers builds."""
    return (module,)


def heads_of(model: Model) -> tuple[str, ...]:
    """Output heads by their names at run time, those included that are tied and so are in no file."""
    return ("lm_head",) if model.tied_head else ()


def is_linear(model: Model, module: str) -> bool:
    """Whether a reader may build a linear layer of a module with a weight matrix."""
    return role_of(model, module) not in ("table", "norm", "convolution")
