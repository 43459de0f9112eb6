"""One model, from its config: what is kept and why, who shares a scale, how stacked experts lie.

Convert, online and verify ask these questions and no others; a table by architecture can answer them in place of
families.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from halfbyte.models.experts import Stacking, projections
from halfbyte.models.families import BASELINE, LOOKUP_TABLES, UNKNOWN, Family, Rule, find_family
from halfbyte.models.names import layer_index


@dataclass(frozen=True)
class Model:
    """What is known of a model. Sizes are None where the config does not give them."""

    family: Family = UNKNOWN
    layers: int | None = None
    """Layers that count from 0; those beyond predict further tokens."""
    tied_head: bool = False
    """The output head is the embedding."""
    hidden: int | None = None
    expert_inner: int | None = None

    @property
    def stacking(self) -> Stacking | None:
        """How unquantized stacked experts lie; None where that is not known."""
        return self.family.stacking

    @cached_property
    def _rules(self) -> tuple[Rule, ...]:
        return (*BASELINE, *self.family.keep)

    def lookup_table(self, module: str) -> str | None:
        """Why a module is no linear layer, whatever is asked for. None: it may be one."""
        for pattern, reason in LOOKUP_TABLES:
            if pattern.search(module):
                return reason
        return None

    def tied(self, module: str) -> str | None:
        """Why readers never look at a module's weight. None: they do."""
        return "output head tied to the embedding" if self.tied_head and module.endswith("lm_head") else None

    def kept(self, module: str) -> str | None:
        """Why a module stays unquantized unless it is asked for by name. None: it is quantized."""
        for pattern, reason in self._rules:
            if pattern.search(module):
                return reason
        layer = layer_index(module)
        if layer is not None and self.layers is not None and layer >= self.layers:
            return "multi token prediction: beyond num_hidden_layers"
        if self.family.only is not None and not self.family.only.search(module):
            return f"{self.family.name} converts experts only"
        return None

    def projections(self, stack: str, rows: int) -> dict[str, slice]:
        """Projection → its rows in one expert of a stack that lies as [outputs, inputs]."""
        return projections(stack, rows, self.stacking or "halves")

    def stack_sizes(self, stack: str) -> tuple[int | None, int | None]:
        """(outputs, inputs) of one expert of a stack, as far as the config gives them."""
        if stack.endswith("down_proj"):
            return self.hidden, self.expert_inner
        return None if self.expert_inner is None else 2 * self.expert_inner, self.hidden


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A value of config.json, or of its text_config."""
    text = config.get("text_config")
    if name not in config and isinstance(text, dict):
        return text.get(name)
    return config.get(name)


def model_of(config: Mapping[str, Any]) -> Model:
    """The model that a config.json describes."""
    text = config.get("text_config")
    family = find_family(str(config.get("model_type", "")))
    if family is UNKNOWN and isinstance(text, dict):
        family = find_family(str(text.get("model_type", "")))
    layers = setting(config, "num_hidden_layers")
    return Model(
        family,
        layers=layers if type(layers) is int and layers > 0 else None,
        tied_head=bool(setting(config, "tie_word_embeddings")),
        hidden=setting(config, "hidden_size"),
        expert_inner=setting(config, "moe_intermediate_size") or setting(config, "intermediate_size"),
    )
