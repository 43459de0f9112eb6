"""Weight sync: parameters of a trainer, quantized as `halfbyte convert` would quantize their checkpoint, bit for bit.

A trainer hands over one converted parameter group at a time (gate and up together, q, k and v together) and sends what
comes back to its inference engines.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

import numpy as np

from halfbyte.arrays import DTYPE_NAMES, Array, is_torch, like, to_numpy
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.repair import LARGEST_PRODUCT, SMALLEST_AMAX
from halfbyte.checkpoint.plan.select import Rules, Selector, matches
from halfbyte.checkpoint.plan.target import Target, activations_of, resolve_target
from halfbyte.checkpoint.plan.types import Options
from halfbyte.codec.bits import F32, dtype_name, widen
from halfbyte.contracts import NVFP4Rule
from halfbyte.device_calls import is_on_card
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.formats import BlockFormat
from halfbyte.layouts.description import Activations, LogicalWeight
from halfbyte.models import Model, model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.models.names import layer_index
from halfbyte.models.partners import share_scales
from halfbyte.online_batch import BatchQuantizer, Modules, Named, batches
from halfbyte.quantize import quantize
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch


__all__ = ["Config", "Named", "check", "quantize_named"]


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

    @property
    def as_json(self) -> dict[str, object]:
        """The same in the words of a config.json."""
        return {
            "model_type": self.model_type,
            "num_hidden_layers": self.num_hidden_layers,
            "tie_word_embeddings": self.tie_word_embeddings,
        }


def quantize_named(params: Iterable[Named], rules: Rules, config: Config) -> list[Named]:
    """Quantize the (name, tensor) pairs of one parameter group; names are those of the checkpoint.

    Returned are the tensors of the layout under its names; what the rules keep comes back as it came. Tensors stay on
    their device and of their kind (numpy or torch). A module whose partner (gate and up, q k v, w1 w3) is not among the
    pairs is an error: their shared scale could not be the checkpoint's. NaN and Inf are refused, except on a card,
    where nothing waits for the device: `check` looks for them afterwards.

    >>> gate = np.ones((32, 64), np.float32)
    >>> pairs = [("layers.0.mlp.gate_proj.weight", gate), ("layers.0.mlp.up_proj.weight", 2 * gate)]
    >>> for name, tensor in quantize_named(pairs, Rules(), Config()):
    ...     print(name, tensor.shape)
    layers.0.mlp.gate_proj.weight (32, 32)
    layers.0.mlp.gate_proj.weight_scale (32, 4)
    layers.0.mlp.gate_proj.weight_scale_2 ()
    layers.0.mlp.up_proj.weight (32, 32)
    layers.0.mlp.up_proj.weight_scale (32, 4)
    layers.0.mlp.up_proj.weight_scale_2 ()
    """
    pairs = list(params)
    if any(len(x.shape) == 3 for _, x in pairs):
        model = model_of(config.as_json)
        pairs = [pair for given in pairs for pair in _unstack(given, model)]
    sync = _decided(tuple(name for name, _ in pairs), [tuple(x.shape) for _, x in pairs], rules, config)
    if sync.fresh and all(is_on_card(pairs[at][1]) for at in sync.fresh):
        return _on_card(pairs, sync)
    for at in sync.fresh:
        dtype_name(to_dtype(pairs[at][1]))
    amaxes = _shared_amaxes(pairs, sync.groups) if sync.format.has_global else {}
    engine = Engine(sync.format, sync.target.contract, sync.target.method, sync.target.repairs)
    result: list[Named] = []
    for at, (name, x) in enumerate(pairs):
        if at in sync.fresh:
            result += _quantized(_module(name), x, amaxes.get(at), engine, sync.target, sync.activations)
        else:
            result.append((name, x))
    return result


def check(named: Iterable[Named]) -> None:
    """Wait for the device, and raise if a tensor-level scale among the results is NaN, Inf or 0.

    On a card `quantize_named` waits for nothing, so it cannot refuse NaN and Inf: they give such scales.
    """
    scalars = [(name, x) for name, x in named if is_torch(x) and str(x.dtype) == "torch.float32" and x.numel() == 1]
    if not scalars:
        return
    import torch

    values = torch.stack([x.reshape(()) for _, x in scalars]).tolist()
    for (name, _), value in zip(scalars, values, strict=True):
        if not 0 < value < float("inf"):
            raise CheckpointError(
                f"{name} is {value}: its weight holds NaN or Inf; repair the weight, or keep the module unquantized"
            )


# --- what happens to which pair ---


@dataclass(frozen=True)
class Sync:
    """What happens to the pairs of a parameter group: found by their names and shapes alone."""

    target: Target
    activations: Activations
    shapes: list[tuple[int, ...]]
    fresh: frozenset[int]
    """The places of the pairs that are quantized."""
    groups: tuple[tuple[int, ...], ...]
    """Those that share a tensor-level scale, in the order of the pairs; every fresh pair is in one."""
    batches: list[Modules] | None
    """How a card quantizes them; None: one by one."""
    quantizers: dict[object, list[BatchQuantizer]] = field(default_factory=dict)
    """By device and dtype."""

    @property
    def format(self) -> BlockFormat:
        if self.target.format is None:
            raise UnsupportedError("weight sync quantizes; there is nothing to do for bf16")
        return self.target.format


MOST_KEPT = 64
_KEPT: dict[object, Sync] = {}


def _decided(names: tuple[str, ...], shapes: list[tuple[int, ...]], rules: Rules, config: Config) -> Sync:
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
    weights = {_module(name): at for at, name in enumerate(names) if name.endswith(".weight") and len(shapes[at]) == 2}
    fresh = {
        module: at
        for module, at in weights.items()
        if _reason(selector, module, shapes[at][-1], format.block, rules, config) is None
    }
    shared, partners = share_scales(
        list(weights), fresh.__contains__, model.family.optional, True, model.fused, model.lacks
    )
    mine = {module: at for module, at in fresh.items() if module not in partners}
    grouped = [tuple(mine[module] for module in group if module in mine) for group in shared]
    together = {at for group in grouped for at in group}
    groups = [group for group in grouped if group] + [(at,) for at in mine.values() if at not in together]
    groups.sort(key=min)
    modules = tuple(map(_module, names))
    return Sync(
        target, activations, shapes, frozenset(mine.values()), tuple(groups),
        batches(modules, shapes, groups, target, activations),
    )  # fmt: skip


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _reason(selector: Selector, module: str, width: int, block: int, rules: Rules, config: Config) -> str | None:
    """Why a parameter is kept; the trainer's name stands in where the checkpoint's has no layer number."""
    reason = selector.reason(module, width, block)
    if reason is None and config.trainer_name:
        for pattern in rules.keep:
            if matches(config.trainer_name, pattern):
                return f"--keep {pattern}"
        if layer_index(module) is None:
            return selector.layer_reason(layer_index(config.trainer_name))
    return reason


# --- on a card ---


def _on_card(pairs: list[Named], sync: Sync) -> list[Named]:
    """The results, without waiting for the device."""
    tensors = [cast("torch.Tensor", x) for _, x in pairs]
    first = tensors[min(sync.fresh)]
    device, dtype = first.device, first.dtype
    for wrong in {tensors[at].dtype for at in sync.fresh}:
        if str(wrong).removeprefix("torch.") not in DTYPE_NAMES:
            dtype_name(wrong)  # raises
    addresses = [x.data_ptr() for x in tensors]
    alike = all(
        tensors[at].dtype is dtype
        and tensors[at].device == device
        and tensors[at].is_contiguous()
        and not addresses[at] & 15
        for at in sync.fresh
    )
    made: dict[int, list[Named]] = {}
    if sync.batches is None or not alike:
        made = _one_by_one(tensors, pairs, sync)
    else:
        quantizers = sync.quantizers.get((device, dtype))
        if quantizers is None:
            quantizers = [BatchQuantizer(modules, sync.target, dtype, device) for modules in sync.batches]
            sync.quantizers[device, dtype] = quantizers
        for quantizer in quantizers:
            at = quantizer.modules.at
            made.update(zip(at, quantizer([tensors[i] for i in at], [addresses[i] for i in at]), strict=True))
    result: list[Named] = []
    for index, pair in enumerate(pairs):
        found = made.get(index)
        if found is None:
            result.append(pair)
        else:
            result += found
    return result


def _one_by_one(tensors: list[torch.Tensor], pairs: list[Named], sync: Sync) -> dict[int, list[Named]]:
    """The same for formats, dtypes and memory that a batch cannot take: partners share an amax on the device."""
    made: dict[int, list[Named]] = {}
    for group in sync.groups:
        amax = None
        if sync.format.has_global:
            found = [tensors[at].detach().abs().amax().float() for at in group]
            amax = functools.reduce(lambda one, other: one.maximum(other), found)  # NaN stays
            if sync.target.repairs:
                raised = amax.clamp_min(float(SMALLEST_AMAX))
                amax = raised.where(amax != 0, raised.new_full((), float(LARGEST_PRODUCT)))
        for at in group:
            made[at] = _from_amax(_module(pairs[at][0]), tensors[at].detach().contiguous(), amax, sync)
    return made


def _from_amax(module: str, x: torch.Tensor, amax: torch.Tensor | None, sync: Sync) -> list[Named]:
    """The tensors of one module, for an amax on the device."""
    import torch

    target, format = sync.target, sync.format
    q = quantize(x, format, target.contract, target.method, global_amax=amax)
    rule = q.contract.rule(format)
    multiplier = cast("torch.Tensor | None", q.global_scale)
    divisor = multiplier
    if multiplier is not None and isinstance(rule, NVFP4Rule):
        encodes = rule.for_method(q.method).stored_as == "encode factor" and q.stored_scale is not None
        divisor = cast("torch.Tensor", q.stored_scale) if encodes else multiplier.reciprocal()
    named: list[Named] = []
    for part in target.layout.parts(LogicalWeight(module, x.shape[0], x.shape[1]), format, sync.activations):
        match part.role:
            case "codes":
                value: Array = q.codes
            case "scales":
                value = _scale_bytes(q, part.dtype)
            case "multiplier" if multiplier is not None:
                value = multiplier.reshape(part.shape)
            case "divisor" if divisor is not None:
                value = divisor.reshape(part.shape)
            case _:
                value = torch.ones(part.shape, dtype=torch.float32, device=x.device)
        named.append((part.name, _transposed(value) if part.transposed else value))
    return named


# --- numpy and the CPU ---


def to_dtype(x: Array) -> object:
    """The numpy dtype that a tensor would have."""
    return to_numpy(x[:0]).dtype


def _shared_amaxes(pairs: list[Named], groups: Iterable[tuple[int, ...]]) -> dict[int, np.float32]:
    shared: dict[int, np.float32] = {}
    for group in groups:
        largest = np.float32(0)
        for at in group:
            largest = np.maximum(largest, _amax(pairs[at][1]))  # NaN stays
        shared |= dict.fromkeys(group, largest)
    return shared


def _amax(x: Array) -> np.float32:
    if is_torch(x):
        return np.float32(x.detach().abs().amax().float().item())
    return np.float32(np.abs(widen(to_numpy(x))).max())


def _quantized(
    module: str, x: Array, amax: np.float32 | None, engine: Engine, target: Target, activations: Activations
) -> list[Named]:
    """The tensors of one module under the layout's names."""
    format = target.format
    if format is None or target.contract is None:
        raise UnsupportedError("no format to quantize to")
    if is_torch(x):
        x = x.detach().contiguous()
    usable = engine.usable_amax(_amax(x) if amax is None else amax, module)
    q = quantize(x, format, target.contract, target.method, global_amax=usable if format.has_global else None)
    scales = engine.tensor_scales(usable, cast("np.dtype[np.generic]", to_dtype(x))) if format.has_global else None
    one = np.float32(1)
    named: list[Named] = []
    for part in target.layout.parts(LogicalWeight(module, x.shape[0], x.shape[1]), format, activations):
        match part.role:
            case "codes":
                value: Array = q.codes
            case "scales":
                value = _scale_bytes(q, part.dtype)
            case "multiplier" | "divisor" if scales is not None:
                word = scales.multiplier if part.role == "multiplier" else scales.divisor
                value = like(_scalar(word, part.shape), x)
            case _:
                value = like(_scalar(one, part.shape), x)
        named.append((part.name, _transposed(value) if part.transposed else value))
    return named


def _transposed(matrix: Array) -> Array:
    return matrix.T.contiguous() if is_torch(matrix) else np.ascontiguousarray(matrix.T)


def _scale_bytes(q: QuantizedTensor, dtype: str) -> Array:
    return q.scales if dtype == "U8" else q.scales_as_float8


def _scalar(value: np.float32, shape: tuple[int, ...]) -> F32:
    return np.full(shape, value, np.float32)


def _unstack(pair: Named, model: Model) -> list[Named]:
    """Stacked experts as one pair per expert and projection."""
    name, x = pair
    if len(x.shape) != 3 or not is_stack(name):
        return [pair]
    if model.stacking is None:
        raise InputError(
            f"{name}: stacked experts of a family whose orientation is not known; hand them over one by one"
        )
    result: list[Named] = []
    for expert in range(x.shape[0]):
        matrix = x[expert].T if model.lies_transposed(name, tuple(x.shape)) else x[expert]
        for projection, rows in model.projections(name, matrix.shape[0]).items():
            result.append((f"{expert_module(name, expert, projection)}.weight", matrix[rows]))
    return result
