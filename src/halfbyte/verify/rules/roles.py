"""Quantized modules that are not linear layers for every reader: tables, heads, routers, towers and so on."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.models import Model
from halfbyte.models.roles import Role
from halfbyte.verify.problems import Level, Problem
from halfbyte.verify.stored import Contents

ROLES: dict[Role, tuple[Level, str]] = {
    "table": ("error", "a lookup table: readers take rows out of it and would take codes for values"),
    "convolution": ("error", "a convolution: no reader has a quantized one"),
    "transposed": ("error", "stored as [in, out] (Conv1D): the blocks lie along the wrong axis"),
    "direct": ("error", "read by the model without its module: transformers would compute with codes"),
    "shared": ("error", "one weight of several layers: readers do not tie it when it is packed"),
    "norm": ("error", "a norm, which has no matrix to multiply with"),
    "other": ("error", "no linear layer in this architecture"),
    "router": ("warning", "a router: vLLM and SGLang build routers unquantized, whatever the config says"),
    "head": (
        "warning",
        "the output head: vLLM 0.32 and SGLang 0.5.23 read it in most models, older ones and others do not",
    ),
    "tower": ("warning", "in a vision or audio tower: vLLM and SGLang build most towers unquantized"),
    "projector": ("warning", "in a projector: vLLM and SGLang build most projectors unquantized"),
}
"""Role → how bad it is that such a module is quantized, and why."""


def role_problems(model: Model, contents: Contents) -> Iterator[Problem]:
    """Every quantized module whose role makes that a mistake or a risk."""
    for weight in contents.quantized.values():
        if weight.storage.stacked:
            continue
        tied = model.tied(weight.name)
        if tied is not None:
            text = f"quantized, but {tied}: readers use the other weight instead"
            yield Problem("error", "tied", weight.name, text)
            continue
        found = ROLES.get(model.role(weight.name))
        if found is not None:
            level, reason = found
            yield Problem(level, "role", weight.name, f"stored as {weight.storage.name}, but it is {reason}")
