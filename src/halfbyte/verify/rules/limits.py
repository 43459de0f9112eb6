"""Checkpoints that are correct, but that some reader cannot use: by reader and reason."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.layouts.description import Layout
from halfbyte.models import Model
from halfbyte.models.limits import limits
from halfbyte.models.transformers_limits import transformers_limits
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents


def limit_problems(
    model: Model, model_type: str, layout: Layout | None, contents: Contents, activations: bool
) -> Iterator[Problem]:
    """A warning for each limit that concerns some weight. activations: whether readers will quantize them too."""
    if layout is None:
        return
    weights = [weight for weight in contents.quantized.values() if weight.storage.layout == layout.name]
    plain = [name.removesuffix(".weight") for name in contents.plain if name.endswith(".weight")]
    for format in dict.fromkeys(weight.storage.format for weight in weights):
        modules = [weight.name for weight in weights if weight.storage.format == format]
        for limit in limits(model_type, layout.name, format, modules, activations):
            yield Problem("warning", "reader", "config.json", limit.text)
        if layout.run_time_names:
            for reason in transformers_limits(model, format, modules, plain):
                yield Problem("warning", "reader", "config.json", reason)
