"""Checkpoints that are correct, but that some reader cannot use: by reader and reason."""

from __future__ import annotations

from collections.abc import Iterator

from halfbyte.layouts.description import Layout
from halfbyte.models import Model
from halfbyte.models.names import ROUTED
from halfbyte.models.transformers_limits import transformers_limits
from halfbyte.verify.problems import Problem
from halfbyte.verify.stored import Contents


def limit_problems(model: Model, layout: Layout | None, contents: Contents) -> Iterator[Problem]:
    """A warning for each limit that concerns some weight, with the first of them."""
    for limits in (model.family.expert_limits, {} if layout is None else layout.expert_limits):
        for format, reason in limits.items():
            weights = contents.quantized.values()
            experts = [weight.name for weight in weights if weight.storage.format == format and ROUTED in weight.name]
            if experts:
                yield Problem("warning", "reader", experts[0], reason)
    if layout is not None and layout.run_time_names and contents.quantized:
        for reason in transformers_limits(model, contents.quantized):
            yield Problem("warning", "reader", "config.json", reason)
