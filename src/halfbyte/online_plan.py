"""Weight sync: what happens to which parameter, found by names and shapes alone and kept for the next step."""

from __future__ import annotations

from dataclasses import dataclass, field

from halfbyte.checkpoint.plan.select import Rules, Selector, matches
from halfbyte.checkpoint.plan.target import Target, activations_of, resolve_target
from halfbyte.checkpoint.plan.types import Options
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Activations
from halfbyte.models import model_of
from halfbyte.models.names import layer_index
from halfbyte.models.partners import share_scales
from halfbyte.online_batch import Batches, Modules, batches


@dataclass(frozen=True)
class Config:
    """What the engines expect: target and model. Take the options that the checkpoint was converted with."""

    options: Options = Options()
    model_type: str = ""
    num_hidden_layers: int | None = None
    tie_word_embeddings: bool = False
    trainer_name: str = ""
    """The trainer's own name of this group (Megatron's, say): patterns match it as well, and its layer number counts
    where the names handed over have none."""

    def __post_init__(self) -> None:
        if not isinstance(self.options, Options):
            raise InputError(f"options of Config are Options(…) of halfbyte.checkpoint, not {self.options!r}")

    @property
    def as_json(self) -> dict[str, object]:
        """The same in the words of a config.json."""
        return {
            "model_type": self.model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
        }


@dataclass(frozen=True)
class Sync:
    """What happens to the pairs of a parameter group: found by their names and shapes alone."""

    target: Target
    activations: Activations
    shapes: list[tuple[int, ...]]
    fresh: tuple[int, ...]
    """The places of the pairs that are quantized."""
    groups: tuple[tuple[int, ...], ...]
    """Those that share a tensor-level scale, in the order of the pairs; every fresh pair is in one."""
    batches: list[Modules] | None
    """How a card quantizes them; None: one by one."""
    quantizers: dict[object, Batches] = field(default_factory=dict)
    """By device and dtype."""

    @property
    def format(self) -> BlockFormat:
        if self.target.format is None:
            raise UnsupportedError("weight sync quantizes; there is nothing to do for bf16")
        return self.target.format


MOST_KEPT = 64
_KEPT: dict[object, Sync] = {}


def decided(names: tuple[str, ...], shapes: list[tuple[int, ...]], rules: Rules, config: Config) -> Sync:
    """The same names come with every step of a trainer: what was decided for them is kept."""
    key = (names, rules, config)
    try:
        found = _KEPT.get(key)
    except TypeError:  # a contract made by hand may hold options that cannot be hashed
        return _decide(names, shapes, rules, config)
    if found is None or found.shapes != shapes:
        found = _decide(names, shapes, rules, config)
        if len(_KEPT) >= MOST_KEPT:
            _KEPT.clear()
        _KEPT[key] = found
    return found


def _decide(names: tuple[str, ...], shapes: list[tuple[int, ...]], rules: Rules, config: Config) -> Sync:
    model = model_of(config.as_json)
    if (rules.keep_first or rules.keep_last) and model.layers is None:
        raise InputError(
            "keep_first and keep_last count layers, so Config needs num_hidden_layers; it has "
            f"{config.num_hidden_layers!r}"
        )
    target = resolve_target(config.options, model.family)
    format = target.format
    if format is None:
        raise UnsupportedError("weight sync quantizes; there is nothing to do for bf16")
    kind, activations = activations_of(config.options, target, sources_have=False)
    if kind == "file":
        raise UnsupportedError(
            "weight sync knows activations none and unit; calibrated scales do not change with weights"
        )
    selector = Selector(rules, model)
    weights = {
        module_of(name): at for at, name in enumerate(names) if name.endswith(".weight") and len(shapes[at]) == 2
    }
    fresh = {
        module: at
        for module, at in weights.items()
        if _reason(selector, module, shapes[at], format.block, rules, config) is None
    }
    shared, partners = share_scales(
        list(weights), fresh.__contains__, model.family.optional, True, model.fused, model.lacks
    )
    mine = {module: at for module, at in fresh.items() if module not in partners}
    grouped = [tuple(mine[module] for module in group if module in mine) for group in shared]
    together = {at for group in grouped for at in group}
    groups = [group for group in grouped if group] + [(at,) for at in mine.values() if at not in together]
    groups.sort(key=min)
    modules = tuple(map(module_of, names))
    return Sync(
        target, activations, shapes, tuple(sorted(mine.values())), tuple(groups),
        batches(modules, shapes, groups, target, activations),
    )  # fmt: skip


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def _reason(
    selector: Selector, module: str, shape: tuple[int, ...], block: int, rules: Rules, config: Config
) -> str | None:
    """Why a parameter is kept; the trainer's name stands in where the checkpoint's has no layer number."""
    if 0 in shape:
        return "no elements"
    reason = selector.reason(module, shape[-1], block)
    if reason is None and config.trainer_name:
        for pattern in rules.keep:
            if matches(config.trainer_name, pattern):
                return f"--keep {pattern}"
        if layer_index(module) is None:
            return selector.layer_reason(layer_index(config.trainer_name))
    return reason
