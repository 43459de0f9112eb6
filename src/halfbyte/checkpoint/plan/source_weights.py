"""Which weights a checkpoint holds and in which form: found from names, dtypes and shapes of the headers.

A weight is one module's matrix with the small tensors that belong to it, or the stacked experts of a layer. What is no
weight (biases, norms, positions) is copied as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from halfbyte.checkpoint.io.decode import Kind, Source, View, block_length, fp8_grid
from halfbyte.checkpoint.io.header import DTYPE_BITS
from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.errors import CheckpointError

FLOATS = ("BF16", "F16", "F32")


@dataclass(frozen=True, slots=True)
class Weight:
    """A module's weight: one matrix, or several that are stacked in one tensor."""

    module: str
    kind: Kind
    tensor: Tensor
    """The tensor that holds the elements; its shard gets the output."""
    sources: tuple[Source, ...]
    """One matrix, or one an expert."""
    belongs: tuple[str, ...] = ()
    """Other tensors that are part of it: scales."""
    dropped: tuple[str, ...] = ()
    """Tensors that lose their meaning: scales of activations under the source's own format."""
    stacked: bool = False


@dataclass
class Found:
    """The weights of a checkpoint, and who owns each tensor that is part of one."""

    weights: list[Weight] = field(default_factory=list)
    owner: dict[str, str] = field(default_factory=dict)
    """Tensor → the module that it is part of."""

    def add(self, weight: Weight) -> None:
        self.weights.append(weight)
        for name in (weight.tensor.name, *weight.belongs):
            if name in self.owner:
                raise CheckpointError(f"{name} belongs to both {self.owner[name]} and {weight.module}")
            self.owner[name] = weight.module


def find_weights(checkpoint: Checkpoint) -> Found:
    """Every weight of a checkpoint. A tensor that should have scales and has none is an error."""
    found = Found()
    for name, tensor in checkpoint.tensors.items():
        for suffix, reader in READERS.items():
            if name.endswith(suffix):
                weight = reader(checkpoint.tensors, name[: -len(suffix)], tensor)
                if weight is not None:
                    found.add(weight)
                break
        else:
            if tensor.info.dtype in FLOATS and len(tensor.info.shape) == 3 and name.endswith(STACKED):
                found.add(_stacked(tensor))
    return found


STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def whole(tensor: Tensor, rows: int | None = None, columns: int | None = None, first: int = 0) -> View:
    """A tensor, or consecutive rows of one from row `first` on, as a matrix; leading axes are joined into rows."""
    shape = tensor.info.shape
    width = columns if columns is not None else (shape[-1] if shape else 1)
    height = rows if rows is not None else (tensor.info.bytes * 8 // DTYPE_BITS[tensor.info.dtype]) // max(1, width)
    size = DTYPE_BITS[tensor.info.dtype] // 8
    return View(
        tensor.name, tensor.file, tensor.info.dtype, tensor.info.start + first * width * size, height, width, width
    )


Tensors = Mapping[str, Tensor]


def _weight(tensors: Tensors, module: str, tensor: Tensor) -> Weight | None:
    """`P.weight`: floats, FP8 with scales, NVFP4 in Model-Optimizer's names, DeepSeek-V4's MXFP4, Quark's MXFP4."""
    dtype, shape = tensor.info.dtype, tensor.info.shape
    if len(shape) != 2 or 0 in shape:
        return None
    if dtype in FLOATS:
        return Weight(module, "float", tensor, (Source("float", *shape, whole(tensor)),))
    if dtype == "F8_E4M3":
        return _fp8(tensors, module, tensor)
    if dtype == "U8" and f"{module}.weight_scale_2" in tensors:
        scale, multiplier = _need(tensors, module, "weight_scale"), tensors[f"{module}.weight_scale_2"]
        _fits(tensor, scale, "F8_E4M3", 16)
        return _nvfp4(tensors, module, tensor, scale, multiplier, f"{module}.input_scale", divides=False)
    if dtype in ("I8", "U8"):
        for suffix in ("scale", "weight_scale"):
            scale_tensor = tensors.get(f"{module}.{suffix}")
            if scale_tensor is not None and scale_tensor.info.dtype in ("F8_E8M0", "U8"):
                _fits(tensor, scale_tensor, scale_tensor.info.dtype, 32)
                source = Source("mxfp4", shape[0], shape[1] * 2, whole(tensor), whole(scale_tensor))
                return Weight(module, "mxfp4", tensor, (source,), (scale_tensor.name,))
    raise CheckpointError(
        f"{tensor.name}: {dtype} of shape {list(shape)} is a weight in a form that no reader knows. Known: BF16, F16, "
        "F32, FP8 with scales, MXFP4 (compressed-tensors, gpt-oss, DeepSeek-V4), NVFP4 (modelopt, compressed-tensors)"
    )


def _fp8(tensors: Tensors, module: str, tensor: Tensor) -> Weight:
    rows, columns = tensor.info.shape
    for suffix in ("weight_scale_inv", "weight_scale", "scale"):
        scale = tensors.get(f"{module}.{suffix}")
        if scale is None:
            continue
        if scale.info.dtype not in (*FLOATS, "F8_E8M0", "U8"):
            raise CheckpointError(f"{scale.name}: scales of dtype {scale.info.dtype} are not known for FP8")
        try:
            grid = fp8_grid(scale.info.shape)
            block_length(rows, grid[0]), block_length(columns, grid[1])
        except CheckpointError as error:
            raise CheckpointError(f"{scale.name}, shape {list(scale.info.shape)}, of {tensor.name}: {error}") from error
        source = Source("fp8", rows, columns, whole(tensor), whole(scale, *grid))
        dropped = _present(tensors, f"{module}.input_scale")
        return Weight(module, "fp8", tensor, (source,), (scale.name,), dropped)
    raise CheckpointError(
        f"{tensor.name} is FP8, but none of {module}.weight_scale_inv, .weight_scale and .scale is in the checkpoint"
    )


def _weight_packed(tensors: Tensors, module: str, tensor: Tensor) -> Weight:
    """`P.weight_packed`: NVFP4 or MXFP4 in compressed-tensors' names."""
    dtype, shape = tensor.info.dtype, tensor.info.shape
    scale = _need(tensors, module, "weight_scale")
    if dtype == "I32" and len(shape) == 2 and 0 not in shape:
        return _int4(tensors, module, tensor, scale)
    if dtype != "U8" or len(shape) != 2 or 0 in shape:
        raise CheckpointError(
            f"{tensor.name}: {dtype} of shape {list(shape)} is no packed weight: FP4 in uint8, or INT4 in int32"
        )
    rows, columns = shape[0], shape[1] * 2
    divisor = tensors.get(f"{module}.weight_global_scale")
    if divisor is None:
        _fits(tensor, scale, "U8", 32)
        return Weight(
            module, "mxfp4", tensor, (Source("mxfp4", rows, columns, whole(tensor), whole(scale)),), (scale.name,)
        )
    _fits(tensor, scale, "F8_E4M3", 16)
    return _nvfp4(tensors, module, tensor, scale, divisor, f"{module}.input_global_scale", divides=True)


def _int4(tensors: Tensors, module: str, tensor: Tensor, scale: Tensor) -> Weight:
    """Symmetric INT4 of compressed-tensors: eight codes an int32, the lowest bits first; a scale a group."""
    rows, columns = tensor.info.shape[0], tensor.info.shape[1] * 8
    if f"{module}.weight_zero_point" in tensors or f"{module}.weight_g_idx" in tensors:
        raise CheckpointError(f"{tensor.name}: INT4 with zero points or permuted groups is not read")
    if scale.info.dtype not in FLOATS or len(scale.info.shape) != 2 or scale.info.shape[0] != rows:
        raise CheckpointError(f"{scale.name}: {scale.info.dtype} {list(scale.info.shape)} are no scales of {rows} rows")
    if columns % scale.info.shape[1] or columns // scale.info.shape[1] not in (32, 64, 128, columns):
        raise CheckpointError(
            f"{scale.name}: {scale.info.shape[1]} scales a row do not fit {columns} elements: groups of 32, 64 or 128"
        )
    info = tensor.info
    view = View(tensor.name, tensor.file, "U8", info.start, rows, columns // 2, columns // 2)
    source = Source("int4", rows, columns, view, whole(scale))
    belongs = (scale.name, *_present(tensors, f"{module}.weight_shape"))
    return Weight(module, "int4", tensor, (source,), belongs)


def _nvfp4(
    tensors: Tensors, module: str, tensor: Tensor, scale: Tensor, stored: Tensor, input_name: str, divides: bool
) -> Weight:
    if f"{module}.pre_quant_scale" in tensors:
        raise CheckpointError(
            f"{module} was quantized with AWQ's pre_quant_scale, which no other layout has a place for"
        )
    given = tensors.get(input_name)
    source = Source(
        "nvfp4",
        tensor.info.shape[0],
        tensor.info.shape[1] * 2,
        whole(tensor),
        whole(scale),
        _scalar(stored),
        divides,
        None if given is None else _scalar(given),
    )
    belongs = (scale.name, stored.name) if given is None else (scale.name, stored.name, given.name)
    return Weight(module, "nvfp4", tensor, (source,), belongs)


def _blocks(tensors: Tensors, module: str, tensor: Tensor) -> Weight:
    """`P_blocks` and `P_scales`: gpt-oss' MXFP4 experts, [E, rows, groups, 16] and [E, rows, groups]."""
    scale = tensors.get(f"{module}_scales")
    shape = tensor.info.shape
    if tensor.info.dtype != "U8" or len(shape) != 4 or shape[3] != 16:
        raise CheckpointError(f"{tensor.name}: expected uint8 [experts, rows, groups, 16], got {list(shape)}")
    if scale is None or scale.info.shape != shape[:3] or scale.info.dtype != "U8":
        raise CheckpointError(f"{tensor.name}: needs {module}_scales, uint8 of shape {list(shape[:3])}")
    count, rows, groups, _ = shape
    sources = tuple(
        Source(
            "mxfp4",
            rows,
            groups * 32,
            whole(tensor, rows, groups * 16, expert * rows),
            whole(scale, rows, groups, expert * rows),
        )
        for expert in range(count)
    )
    return Weight(module, "mxfp4", tensor, sources, (scale.name,), stacked=True)


def _stacked(tensor: Tensor) -> Weight:
    """Float experts in one 3-D tensor, as they lie; `families` knows which axis is which."""
    count, rows, columns = tensor.info.shape
    sources = tuple(
        Source("float", rows, columns, whole(tensor, rows, columns, expert * rows)) for expert in range(count)
    )
    return Weight(tensor.name, "float", tensor, sources, stacked=True)


def _need(tensors: Tensors, module: str, suffix: str) -> Tensor:
    found = tensors.get(f"{module}.{suffix}")
    if found is None:
        raise CheckpointError(f"{module} is quantized, but {module}.{suffix} is not in the checkpoint")
    return found


def _present(tensors: Tensors, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in tensors)


def _scalar(tensor: Tensor) -> View:
    if tensor.info.dtype not in FLOATS or tensor.info.shape not in ((), (1,)):
        raise CheckpointError(f"{tensor.name}: expected one float, got {tensor.info.dtype} {list(tensor.info.shape)}")
    return whole(tensor, 1, 1)


def _fits(codes: Tensor, scale: Tensor, dtype: str, block: int) -> None:
    rows, packed = codes.info.shape
    wanted = (rows, packed * 2 // block)
    if packed * 2 % block or scale.info.shape != wanted or scale.info.dtype != dtype:
        raise CheckpointError(
            f"{scale.name}: {codes.name} of shape {list(codes.info.shape)} needs {dtype} scales of shape "
            f"{list(wanted)}, got {scale.info.dtype} {list(scale.info.shape)}"
        )


READERS: dict[str, Callable[[Tensors, str, Tensor], Weight | None]] = {
    ".weight": _weight,
    ".weight_packed": _weight_packed,
    "_blocks": _blocks,
}
"""Ending of a tensor's name → who reads it."""
