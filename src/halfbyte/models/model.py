"""One model, from its config: what each module is, what is kept and why, who shares a scale, how stacked experts lie.

Convert, online and verify ask these questions and no others. The table of architectures answers first; where it does
not know a module, the rules for names do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from halfbyte.models.architectures import Architecture, RunTime, find_architecture
from halfbyte.models.config import setting, text_part
from halfbyte.models.experts import Stacking, is_transposed, projections
from halfbyte.models.families import POLICIES, UNKNOWN, Family, find_family
from halfbyte.models.names import layer_index, pattern_of
from halfbyte.models.partners import ANY, FusedLayers, fused_layers_of
from halfbyte.models.roles import NEVER, REASONS, Role, role_by_name

HEAD = "lm_head"
"""What the head of a language model is called where nothing is known of it."""


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
    architecture: Architecture | None = None
    """The row of the table; None for an architecture that it does not have."""
    name: str = ""
    """The class or the model type that the config names."""
    fused: FusedLayers = ANY
    """What servers fuse in it."""

    @property
    def known(self) -> bool:
        """Whether the table has this architecture."""
        return self.architecture is not None

    def is_known(self, module: str) -> bool:
        """Whether the table has this module."""
        return self.architecture is not None and self.architecture.role(module) is not None

    def lacks(self, partner: str, module: str) -> bool:
        """Whether the architecture is known to have a module, but no such partner of it."""
        return self.is_known(module) and not self.is_known(partner)

    def role(self, module: str) -> Role:
        """What a module is: by the table, else by its name."""
        found = None if self.architecture is None else self.architecture.role(module)
        return role_by_name(module) if found is None else found

    def run_time(self, module: str) -> RunTime:
        """What transformers calls a module at run time, and what it does to its weight on the way."""
        if self.architecture is None:
            return RunTime((module,))
        return self.architecture.module_at_run_time(module)

    @property
    def heads(self) -> tuple[str, ...]:
        """Names of the output heads at run time, whether or not the checkpoint holds them."""
        if self.architecture is None:
            return (HEAD,)
        return self.architecture.heads()

    @property
    def stacking(self) -> Stacking | None:
        """How unquantized stacked experts lie; None where that is not known."""
        return self.family.stacking

    def never(self, module: str) -> str | None:
        """Why a module is no linear layer, whatever is asked for. None: it may be one."""
        role = self.role(module)
        if role == "table" or (role in NEVER and self.is_known(module)):
            return REASONS[role]
        return None

    def tied(self, module: str) -> str | None:
        """Why readers never look at a module's weight. None: they do."""
        if not self.tied_head:
            return None
        names = {pattern_of(name) for name in (module, *self.run_time(module).names)}
        tied = {HEAD} if self.architecture is None else set(self.architecture.tied)
        if not names & tied and not module.endswith(HEAD):
            return None
        return "output head tied to the embedding" if self.role(module) == "head" else "tied to another weight"

    def kept(self, module: str) -> str | None:
        """Why a module stays unquantized unless it is asked for by name. None: it is quantized."""
        role = self.role(module)
        if role != "linear":
            return REASONS[role]
        for pattern, reason in (*POLICIES, *self.family.keep):
            if pattern.search(module):
                return reason
        layer = layer_index(module)
        if layer is not None and self.layers is not None and layer >= self.layers and not self._counts_anew:
            return "multi token prediction: beyond num_hidden_layers"
        if self.family.only is not None and not self.family.only.search(module):
            return f"{self.family.name} converts experts only"
        return None

    @property
    def _counts_anew(self) -> bool:
        """Whether there are several lists of layers, of which num_hidden_layers counts but one."""
        return self.architecture is not None and self.architecture.layer_stacks > 1

    def lies_transposed(self, stack: str, shape: tuple[int, ...]) -> bool:
        """Whether each expert of an unquantized stack of that shape lies as [inputs, outputs].

        Families that store them so are also saved the other way round; sizes of the config tell where they can.
        """
        if self.stacking is None or not is_transposed(self.stacking):
            return False
        upright = self.stack_sizes(stack)
        return self.stacking == "interleaved" or upright[0] == upright[1] or shape[1:] != upright

    def projections(self, stack: str, rows: int) -> dict[str, slice]:
        """Projection → its rows in one expert of a stack that lies as [outputs, inputs]."""
        return projections(stack, rows, self.stacking or "halves")

    def stack_sizes(self, stack: str) -> tuple[int | None, int | None]:
        """(outputs, inputs) of one expert of a stack, as far as the config gives them."""
        if stack.endswith("down_proj"):
            return self.hidden, self.expert_inner
        return None if self.expert_inner is None else 2 * self.expert_inner, self.hidden


def model_of(config: Mapping[str, Any], architecture: Architecture | None = None) -> Model:
    """The model that a config.json describes. `architecture`: what is known of it from elsewhere than the table."""
    family = find_family(str(config.get("model_type", "")))
    if family is UNKNOWN:
        family = find_family(str(text_part(config).get("model_type", "")))
    architecture = architecture or find_architecture(config)
    layers = setting(config, "num_hidden_layers")
    return Model(
        family,
        layers=layers if type(layers) is int and layers > 0 else None,
        tied_head=_tied_head(config, architecture),
        hidden=setting(config, "hidden_size"),
        expert_inner=setting(config, "moe_intermediate_size") or setting(config, "intermediate_size"),
        architecture=architecture,
        fused=fused_layers_of(config),
        name=_name(config),
    )


def _name(config: Mapping[str, Any]) -> str:
    """The class that a config names, or its model type; "" where it has neither."""
    named = config.get("architectures")
    candidates = (*(named if isinstance(named, list) else ()), config.get("model_type"))
    return next((name for name in candidates if isinstance(name, str)), "")


def _tied_head(config: Mapping[str, Any], architecture: Architecture | None) -> bool:
    """What the config says, or what its class does where the config leaves it out."""
    said = setting(config, "tie_word_embeddings")
    if said is None:
        return architecture is not None and architecture.tied_by_default
    return bool(said)
