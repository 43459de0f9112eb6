"""What verify asks of a model, all in one place: the role of a module, its names at run time, the output heads."""

from __future__ import annotations

from halfbyte.models import Model
from halfbyte.models.experts import is_stack
from halfbyte.models.roles import Role


def role_of(model: Model, module: str) -> Role:
    """What a module is: linear, table, norm, head, router, tower and so on."""
    return model.role(module)


def runtime_names(model: Model, module: str) -> tuple[str, ...]:
    """The names of a module of the file in the model that transformers builds; stacks of experts are left out."""
    return tuple(name for name in model.run_time(module).names if not is_stack(name))


def heads_of(model: Model) -> tuple[str, ...]:
    """Output heads by their names at run time, those included that are tied and so are in no file."""
    return model.heads if model.known or model.tied_head else ()


def knows(model: Model, module: str) -> bool:
    """Whether the model is known to have a module of that name, in the file or at run time only."""
    return model.known and model.is_known(module)


def is_linear(model: Model, module: str) -> bool:
    """Whether a reader may build a linear layer of a module with a weight matrix."""
    return role_of(model, module) not in ("table", "norm", "convolution", "other")
