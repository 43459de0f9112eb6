"""Weight sync: parameters of a trainer, quantized as `halfbyte convert` would quantize their checkpoint, bit for bit.

A trainer hands over one converted parameter group at a time (gate and up together, q, k and v together) and sends what
comes back to its inference engines.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import cast

import numpy as np

from halfbyte.arrays import Array, is_torch, like, to_numpy
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.plan.select import Rules, Selector, matches
from halfbyte.checkpoint.plan.target import Target, activations_of, resolve_target
from halfbyte.checkpoint.plan.types import Options
from halfbyte.codec.bits import F32, dtype_name, widen
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.layouts.description import Activations, LogicalWeight
from halfbyte.models import Model, model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.models.names import layer_index
from halfbyte.models.partners import share_scales
from halfbyte.quantize import quantize
from halfbyte.types import QuantizedTensor

Named = tuple[str, Array]


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


def quantize_named(params: Iterable[Named] | Mapping[str, Array], rules: Rules, config: Config) -> list[Named]:
    """Quantize the (name, tensor) pairs of one parameter group; names are those of the checkpoint.

    Returned are the tensors of the layout under its names; what the rules keep comes back as it came. Tensors stay on
    their device and of their kind (numpy or torch). A module whose partner (gate and up, q k v, w1 w3) is not among the
    pairs is an error: their shared scale could not be the checkpoint's. NaN and Inf are refused.

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
    pairs = [pair for given in _named(params) for pair in _unstack(given, model)]
    weights = {name.removesuffix(".weight"): x for name, x in pairs if name.endswith(".weight") and len(x.shape) == 2}
    reasons = {module: _reason(selector, module, x, format.block, rules, config) for module, x in weights.items()}
    fresh = {module for module, reason in reasons.items() if reason is None}
    groups, partners = share_scales(
        list(weights), fresh.__contains__, model.family.optional, True, model.fused, model.lacks
    )
    amaxes = _shared_amaxes(weights, [group for group in groups if format.has_global])
    engine = Engine(format, target.contract, target.method, target.repairs)
    result: list[Named] = []
    for name, x in pairs:
        module = name.removesuffix(".weight")
        if module in fresh and module not in partners and name.endswith(".weight"):
            result += _quantized(module, x, amaxes.get(module), engine, target, activations)
        else:
            result.append((name, x))
    return result


def _named(params: object) -> list[Named]:
    """The (name, tensor) pairs, checked. A mapping of names to tensors serves too."""
    if isinstance(params, Mapping):
        params = params.items()
    if not isinstance(params, Iterable):
        raise InputError(f"quantize_named takes (name, tensor) pairs, not {type(params).__name__}")
    pairs: dict[str, Array] = {}
    for number, pair in enumerate(params):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], str)):
            raise InputError(f"quantize_named takes (name, tensor) pairs; number {number} is no such pair")
        name, x = pair
        if isinstance(x, np.generic):
            x = np.asarray(x)
        if not (isinstance(x, np.ndarray) or is_torch(x)):
            raise InputError(f"{name} must be a numpy array or a torch tensor, not {type(x).__name__}")
        if name in pairs:
            raise InputError(f"{name} is given twice")
        pairs[name] = x
    return list(pairs.items())


def _reason(selector: Selector, module: str, x: Array, block: int, rules: Rules, config: Config) -> str | None:
    """Why a parameter is kept; the trainer's name stands in where the checkpoint's has no layer number."""
    if 0 in x.shape:
        return "no elements"
    try:
        dtype_name(to_dtype(x))
    except InputError as error:
        raise InputError(f"{module}.weight: {error}") from error
    reason = selector.reason(module, int(x.shape[-1]), block)
    if reason is None and config.trainer_name:
        for pattern in rules.keep:
            if matches(config.trainer_name, pattern):
                return f"--keep {pattern}"
        if layer_index(module) is None:
            return selector.layer_reason(layer_index(config.trainer_name))
    return reason


def to_dtype(x: Array) -> object:
    """The numpy dtype that a tensor would have."""
    return to_numpy(x[:0]).dtype


def _shared_amaxes(weights: dict[str, Array], groups: Iterable[tuple[str, ...]]) -> dict[str, np.float32]:
    shared: dict[str, np.float32] = {}
    for group in groups:
        largest = np.float32(0)
        for module in group:
            largest = np.maximum(largest, _amax(weights[module]))  # NaN stays
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
    largest = _amax(x) if amax is None else amax
    if not np.isfinite(largest):
        who = module if not np.isfinite(_amax(x)) else f"a partner of {module}"
        raise CheckpointError(
            f"{who} holds {'NaN' if np.isnan(largest) else 'Inf'}: its scale would be unusable; repair it, or keep the "
            f"module unquantized: Rules(keep=({module!r},))"
        )
    usable = engine.usable_amax(largest, module)
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
