"""What a transformers model is made of, asked of the model itself: the one place that needs torch and transformers.

The shipped table (`architectures.json`) is made of these descriptions, and `--modules-from-model` asks for one. A model
on the meta device will do: no weight is read.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from halfbyte.models.names import pattern_of
from halfbyte.models.roles import HEAD, PROJECTOR, ROUTER, TOWER, Role

STACKED = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
"""Parameters of three axes that hold one matrix per expert."""


def describe(model: Any) -> dict[str, Any]:
    """Roles of modules by name pattern, tied weights, stacked experts, and how names on disk become these names.

    Patterns are names at run time with # for each number. A pattern whose modules differ has its most cautious role.
    """
    structure = Structure(model)
    roles: dict[str, Role] = {}
    stacks: dict[str, str | None] = {}
    for name, module in model.named_modules():
        role = structure.role(name, module)
        if role is not None:
            pattern = pattern_of(name)
            roles[pattern] = _cautious(roles.get(pattern), role)
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 3 and leaf in STACKED and name.endswith("experts"):
                stacks[pattern_of(f"{name}.{leaf}")] = _stacking(module, parameter.shape, structure.hidden)
    grouped: dict[str, list[str]] = {}
    for pattern, role in roles.items():
        grouped.setdefault(role, []).append(pattern)
    description = {
        "model_type": model.config.model_type,
        "prefix": model.base_model_prefix,
        "tied_by_default": bool(getattr(model.config, "tie_word_embeddings", False)),
        "modules": {role: grouped[role] for role in sorted(grouped)},
        "tied": _tied(model),
        "stacks": stacks,
        "renames": list(_renames(model)),
    }
    read = read_at_start(model, roles)
    return {**description, "read_at_start": read} if read else description


CAUTION: tuple[Role, ...] = (
    "linear", "norm", "table", "convolution", "transposed", "other", "projector", "tower", "direct", "shared", "router",
    "head",
)  # fmt: skip
"""Roles, the most cautious last."""


def _cautious(before: Role | None, role: Role) -> Role:
    return role if before is None or CAUTION.index(role) > CAUTION.index(before) else before


class Structure:
    """The parts of a model: language model, heads, towers; what its modules do with each other's weights."""

    def __init__(self, model: Any) -> None:
        import torch
        from transformers import PreTrainedModel
        from transformers.pytorch_utils import Conv1D

        self.torch, self.transposed = torch, Conv1D
        submodels = [(name, module) for name, module in model.named_modules() if isinstance(module, PreTrainedModel)]
        self.base = model.base_model_prefix if hasattr(model, model.base_model_prefix) else ""
        self.heads = {id(head) for _, part in submodels for head in [_output_of(part)] if head is not None}
        text = model.config.get_text_config()
        self.hidden = getattr(text, "hidden_size", None)
        self.language = (
            []
            if text is model.config
            else [name for name, module in submodels if module.config is text and name not in ("", self.base)]
        )
        self.submodels = [name for name, _ in submodels if name not in ("", self.base)]
        tables = {pattern_of(name) for name, module in model.named_modules() if isinstance(module, torch.nn.Embedding)}
        ties = {_module(target): _module(source) for target, source in _tied(model).items()}
        self.tied_heads = {target for target, source in ties.items() if source in tables}
        self.shared = {name for tie in ties.items() if tie[1] not in tables for name in tie}
        read = {kind: weights_read(kind) for kind in {type(module) for module in model.modules()}}
        self.direct = {
            f"{name}.{child}".lstrip(".")
            for name, module in model.named_modules()
            for child in read[type(module)]
            if not isinstance(module, PreTrainedModel)
        }

    def role(self, name: str, module: Any) -> Role | None:
        """What a module with a weight is; None for one without."""
        nn = self.torch.nn
        weight = module._parameters.get("weight")
        if weight is None:
            return None
        if isinstance(module, nn.Embedding):
            return "table"
        if isinstance(module, self.transposed):
            return "transposed"
        if isinstance(module, nn.modules.conv._ConvNd):
            return "convolution"
        if weight.dim() == 1:
            return "norm"
        return "other" if weight.dim() > 2 else self._matrix(name, module)

    def _matrix(self, name: str, module: Any) -> Role:
        if re.search(ROUTER, name):
            return "router"
        if not isinstance(module, self.torch.nn.Linear):
            return "other"
        pattern = pattern_of(name)
        if id(module) in self.heads or pattern in self.tied_heads or re.search(HEAD, name):
            return "head"
        outside = self._outside(name)
        if outside is not None:
            return outside
        if pattern in self.shared:
            return "shared"
        return "direct" if name in self.direct else "linear"

    def _outside(self, name: str) -> Role | None:
        """head, tower or projector for a linear layer that is not in the language model."""
        if self.language:
            if _under(name, self.language):
                return None
            return "tower" if _under(name, self.submodels) else "projector"
        if re.search(TOWER, name):
            return "tower"
        if re.search(PROJECTOR, name):
            return "projector"
        if self.base and not name.startswith(f"{self.base}."):
            return "tower" if _under(name, self.submodels) else "head"
        return None


def _module(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _under(name: str, parents: list[str]) -> bool:
    return any(name.startswith(f"{parent}.") for parent in parents)


def _output_of(model: Any) -> Any:
    """The module that makes logits, if a model says which."""
    try:
        return model.get_output_embeddings()
    except (AttributeError, NotImplementedError, TypeError):
        return None


def _tied(model: Any) -> dict[str, str]:
    """Weight → the weight that it shares its storage with where the config ties them; patterns of parameter names."""
    from transformers import PreTrainedModel

    configs = {id(part.config): part.config for part in model.modules() if isinstance(part, PreTrainedModel)}
    before = {key: getattr(config, "tie_word_embeddings", None) for key, config in configs.items()}
    try:
        for config in configs.values():
            config.tie_word_embeddings = True
        found = model.get_expanded_tied_weights_keys(all_submodels=True)
    finally:
        for key, config in configs.items():
            if before[key] is None:
                del config.tie_word_embeddings
            else:
                config.tie_word_embeddings = before[key]
    return {pattern_of(target): pattern_of(source) for target, source in found.items() if target.endswith(".weight")}


def _stacking(experts: Any, shape: tuple[int, ...], hidden: int | None) -> str | None:
    """How stacked experts lie at run time, in the words of `models.experts`; None where the model does not tell."""
    transposed = getattr(experts, "is_transposed", None)
    if transposed is None:  # no word about it in the class: the hidden size tells rows from columns
        if (shape[1] == hidden) == (shape[2] == hidden):
            return None
        transposed = (shape[1] == hidden) == hasattr(experts, "gate_up_proj")
    concatenated = getattr(experts, "is_concatenated", True)
    if not transposed:
        return "halves" if concatenated else None
    return "transposed" if concatenated else "interleaved"


def weights_read(kind: type[Any]) -> frozenset[str]:
    """Children whose weight a module reads and which it never calls: `self.dt_proj.weight`."""
    if kind.__module__.startswith("torch"):
        return frozenset()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    read, called = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "weight":
            read.add(_own_child(node.value))
        elif isinstance(node, ast.Call):
            called.add(_own_child(node.func))
    return frozenset(child for child in read - called if child is not None)


def _own_child(node: ast.AST) -> str | None:
    """The name X of an expression `self.X`."""
    own = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"
    return node.attr if own and isinstance(node, ast.Attribute) else None


def read_at_start(model: Any, roles: Mapping[str, str]) -> list[str]:
    """Patterns of linear layers whose weight the model's own initialisation reads. transformers runs it for every model
    that it loads, so it cannot load such a layer packed. The model is of no use afterwards.
    """
    packed: dict[int, tuple[str, Any]] = {}
    for name, module in model.named_modules():
        if roles.get(pattern_of(name)) == "linear" and "weight" in module._parameters:
            packed[id(module)] = pattern_of(name), module._parameters.pop("weight")
    found: list[str] = []
    while True:
        for module in model.modules():
            module.__dict__.pop("_is_hf_initialized", None)
        try:
            model.initialize_weights()
            return found
        except AttributeError as error:
            if id(error.obj) not in packed:
                raise
            pattern = packed[id(error.obj)][0]
        found.append(pattern)
        for module in model.modules():
            if packed.get(id(module), ("",))[0] == pattern:
                module._parameters["weight"] = packed[id(module)][1]


def _renames(model: Any) -> Iterator[dict[str, Any]]:
    """transformers' own rules that turn names on disk into names at run time, in the order in which they apply."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import GroupWeightRename

    for rule in get_model_conversion_mapping(model):
        operations = [type(operation).__name__ for operation in getattr(rule, "operations", ())]
        of_weights = all(source.endswith(".weight") for source in rule._original_source_patterns)
        yield {
            "find": rule.compiled_sources.pattern,
            "put": list(rule.target_patterns),
            **({"scope": [rule.scope_prefix, rule.base_model_prefix]} if rule.scope_prefix is not None else {}),
            **({"paired": True} if isinstance(rule, GroupWeightRename) else {}),
            **({"operations": operations} if hasattr(rule, "operations") else {}),
            **({"of_weights": True} if hasattr(rule, "operations") and of_weights else {}),
        }
