"""What verify asks of a model beyond roles: names at run time, output heads, what readers build as a linear layer."""

from __future__ import annotations

from halfbyte.models import Model
from halfbyte.models.experts import is_stack


def runtime_names(model: Model, module: str) -> tuple[str, ...]:
    """The names of a module of the file in the model that transformers builds; stacks of experts are left out."""
    return tuple(name for name in model.run_time(module).names if not is_stack(name))


def heads_of(model: Model) -> tuple[str, ...]:
    """Output heads by their names at run time, those included that are tied and so are in no file."""
    return model.heads if model.known or model.tied_head else ()


def is_linear(model: Model, module: str) -> bool:
    """Whether a reader may build a linear layer of a module with a weight matrix."""
    return model.role(module) not in ("table", "norm", "convolution", "other")
