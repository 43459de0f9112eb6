"""Weight sync: parameters of a trainer, quantized as `halfbyte convert` would quantize their checkpoint, bit for bit.

A trainer hands over one converted parameter group at a time (gate and up together, q, k and v together) and sends what
comes back to its inference engines.
"""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from halfbyte.arrays import DTYPE_NAMES, Array, check_dense, is_torch, like, to_numpy
from halfbyte.backends.headroom import ALONE
from halfbyte.backends.survey import raised_together
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.repair import LARGEST_PRODUCT, SMALLEST_AMAX
from halfbyte.checkpoint.plan.select import Rules
from halfbyte.checkpoint.plan.target import Target
from halfbyte.codec.bits import F32, dtype_name, widen
from halfbyte.contracts import NVFP4Rule
from halfbyte.errors import CheckpointError, InputError, UnsupportedError
from halfbyte.layouts.description import Activations, LogicalWeight
from halfbyte.models import Model, model_of
from halfbyte.models.experts import expert_module, is_stack
from halfbyte.online_batch import Batches, Named
from halfbyte.online_plan import Config, Sync, decided, module_of
from halfbyte.quantize import quantize
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.types import QuantizedTensor

if TYPE_CHECKING:
    import torch


__all__ = ["Config", "Named", "check", "quantize_named"]


def quantize_named(params: Iterable[Named] | Mapping[str, Array], rules: Rules, config: Config) -> list[Named]:
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
    if not (isinstance(rules, Rules) and isinstance(config, Config)):
        raise InputError(
            "quantize_named takes the pairs, Rules(…) of halfbyte.checkpoint and Config(…) of halfbyte.online, not "
            f"{type(rules).__name__} and {type(config).__name__}"
        )
    if are_flushed():
        with subnormals_kept():
            return quantize_named(params, rules, config)
    pairs = _named(params)
    names, arrays = zip(*pairs, strict=True) if pairs else ((), ())
    shapes = list(map(operator.attrgetter("shape"), arrays))
    if 3 in map(len, shapes):
        model = model_of(config.as_json)
        pairs = [pair for given in pairs for pair in _unstack(given, model)]
        names, arrays = zip(*pairs, strict=True)
        shapes = [x.shape for x in arrays]
    sync = decided(names, shapes, rules, config)
    fresh = [arrays[at] for at in sync.fresh]
    devices = set(map(operator.attrgetter("device"), fresh))
    if fresh and all(getattr(device, "type", device) == "cuda" for device in devices):  # numpy's devices are words
        return _on_card(pairs, list(arrays), fresh, sync)
    for at in sync.fresh:
        _check_dtype(*pairs[at])
    engine = Engine(sync.format, sync.target.contract, sync.target.method, sync.target.repairs)
    amaxes = _shared_amaxes(pairs, sync.groups, engine) if sync.format.has_global else {}
    result: list[Named] = []
    quantized = set(sync.fresh)
    for at, (name, x) in enumerate(pairs):
        if at in quantized:
            result += _quantized(module_of(name), x, amaxes.get(at), engine, sync.target, sync.activations)
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


# --- what is given ---


def _named(params: object) -> list[Named]:
    """The (name, tensor) pairs, checked. A mapping of names to tensors serves too."""
    if isinstance(params, Mapping):
        params = params.items()
    if not isinstance(params, Iterable):
        raise InputError(f"quantize_named takes (name, tensor) pairs, not {type(params).__name__}")
    params = list(params)
    if _are_usual(params):
        return params
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


def _are_usual(params: list[Any]) -> bool:
    """Whether these are different names with arrays or ordinary tensors. Many of them are asked about at once."""
    if set(map(type, params)) != {tuple} or set(map(len, params)) != {2}:
        return False
    names, arrays = zip(*params, strict=True)
    kinds = {np.ndarray}
    if (torch := sys.modules.get("torch")) is not None:
        kinds |= {torch.Tensor, torch.nn.Parameter}
    return set(map(type, names)) == {str} and len(set(names)) == len(names) and set(map(type, arrays)) <= kinds


def _check_dtype(name: str, x: Array) -> None:
    try:
        dtype_name(to_dtype(x))
    except InputError as error:
        raise InputError(f"{name}: {error}") from error


# --- on a card ---


def _on_card(pairs: list[Named], tensors: list[torch.Tensor], fresh: list[torch.Tensor], sync: Sync) -> list[Named]:
    """The results, without waiting for the device. Everything here happens once per tensor: it must be short."""
    import torch

    dtypes, devices = (set(map(operator.attrgetter(name), fresh)) for name in ("dtype", "device"))
    for dtype in dtypes:
        if str(dtype).removeprefix("torch.") not in DTYPE_NAMES:
            dtype_name(dtype)  # raises
    if sync.batches is None or not len(dtypes) == len(devices) == 1:
        made = _one_by_one(tensors, pairs, sync)
        return [named for at, pair in enumerate(pairs) for named in made.get(at, [pair])]
    addresses = list(map(torch.Tensor.data_ptr, tensors))
    usual = all(map(torch.Tensor.is_contiguous, fresh))
    if not usual or functools.reduce(operator.or_, map(addresses.__getitem__, sync.fresh)) & 15:
        for at in sync.fresh:
            tensors[at] = tensors[at].detach().clone(memory_format=torch.contiguous_format)
        addresses = list(map(torch.Tensor.data_ptr, tensors))
    (dtype,), (device,) = dtypes, devices
    found = sync.quantizers.get((device, dtype))
    if found is None:
        found = Batches(sync.batches, len(pairs), sync.target, dtype, device)
        sync.quantizers[device, dtype] = found
    return found(pairs, tensors, addresses)


def _one_by_one(tensors: list[torch.Tensor], pairs: list[Named], sync: Sync) -> dict[int, list[Named]]:
    """The same for formats and dtypes that a batch cannot take: partners share an amax on the device.

    A headroom is chosen on the host then, which waits for the device.
    """
    made: dict[int, list[Named]] = {}
    engine = Engine(sync.format, sync.target.contract, sync.target.method, sync.target.repairs)
    for group in sync.groups:
        amax = None
        if sync.format.has_global:
            found = [tensors[at].detach().abs().amax().float() for at in group]
            amax = functools.reduce(lambda one, other: one.maximum(other), found)  # NaN stays
            if sync.target.repairs:
                raised = amax.clamp_min(float(SMALLEST_AMAX))
                amax = raised.where(amax != 0, raised.new_full((), float(LARGEST_PRODUCT)))
            if engine.headrooms(sum(tensors[at].numel() for at in group)) != ALONE:
                members: list[Array] = [tensors[at].detach().cpu() for at in group]
                own = functools.reduce(np.maximum, map(_amax, members))
                if (raised_by_headroom := _raised(members, own, engine)) > own:
                    amax = amax.new_full((), float(raised_by_headroom))
        for at in group:
            made[at] = _from_amax(module_of(pairs[at][0]), tensors[at].detach().contiguous(), amax, sync)
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
    if is_torch(x):
        check_dense(x)
    return to_numpy(x[:0]).dtype


def _shared_amaxes(
    pairs: list[Named], groups: Iterable[tuple[int, ...]], engine: Engine
) -> dict[int, tuple[np.float32, np.float32]]:
    """For each tensor, the amax of its group, and the one to quantize the group with."""
    shared: dict[int, tuple[np.float32, np.float32]] = {}
    for group in groups:
        largest = np.float32(0)
        for at in group:
            largest = np.maximum(largest, _amax(pairs[at][1]))  # NaN stays
        shared |= dict.fromkeys(group, (largest, _raised([pairs[at][1] for at in group], largest, engine)))
    return shared


def _raised(members: list[Array], amax: np.float32, engine: Engine) -> np.float32:
    """The amax of tensors that share it, raised by the headroom with the least error if the method chooses one."""
    if engine.headrooms(sum(math.prod(x.shape) for x in members)) == ALONE or not np.isfinite(amax) or amax == 0:
        return amax
    if engine.usable_amax(amax, "") != amax:
        return amax
    return raised_together([to_numpy(x.detach() if is_torch(x) else x) for x in members], amax, engine.choosing)


def _amax(x: Array) -> np.float32:
    if is_torch(x):
        return np.float32(x.detach().abs().amax().float().item())
    return np.float32(np.abs(widen(to_numpy(x))).max())


def _quantized(
    module: str,
    x: Array,
    amaxes: tuple[np.float32, np.float32] | None,
    engine: Engine,
    target: Target,
    activations: Activations,
) -> list[Named]:
    """The tensors of one module under the layout's names."""
    format = target.format
    if format is None or target.contract is None:
        raise UnsupportedError("no format to quantize to")
    if is_torch(x):
        x = x.detach().contiguous()
    largest, raised = (_amax(x),) * 2 if amaxes is None else amaxes
    if amaxes is None and format.has_global:
        raised = _raised([x], largest, engine)
    if not np.isfinite(largest):
        who = module if not np.isfinite(_amax(x)) else f"a partner of {module}"
        raise CheckpointError(
            f"{who} holds {'NaN' if np.isnan(largest) else 'Inf'}: its scale would be unusable; repair it, or keep the "
            f"module unquantized: Rules(keep=({module!r},))"
        )
    usable = engine.usable_amax(raised, module)
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
