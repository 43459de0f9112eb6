"""Weights found from headers alone: which tensors each has, where its matrices lie, and what is no weight."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint.io.header import Header, TensorInfo, tensor_bytes
from halfbyte.checkpoint.io.index import Checkpoint, Tensor
from halfbyte.checkpoint.io.views import View
from halfbyte.checkpoint.plan.source_weights import Found, SourceWeight, find_source_weights
from halfbyte.errors import CheckpointError

Shapes = dict[str, tuple[str, tuple[int, ...]]]
A, B = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"
STACK = "model.layers.0.mlp.experts.gate_up_proj"


def checkpoint(tensors: Shapes) -> Checkpoint:
    """A checkpoint of headers: the data of each tensor behind that of the one before, from byte 1000 on."""
    at, found = 1000, {}
    for name, (dtype, shape) in tensors.items():
        found[name] = TensorInfo(name, dtype, shape, at, at + tensor_bytes(dtype, shape))
        at = found[name].stop
    header = Header(Path("f"), found, {}, at, 0, "")
    listed = {name: Tensor(info, "f") for name, info in found.items()}
    return Checkpoint(Path("m"), {"f": header}, listed, {}, {}, (), {})


def find(tensors: Shapes) -> list[SourceWeight]:
    return find_source_weights(checkpoint(tensors)).weights


def told(view: View | None) -> tuple[Any, ...] | None:
    """(byte, dtype, rows, columns, strides)"""
    if view is None:
        return None
    return (view.offset, view.dtype, view.rows, view.columns, view.row_stride, view.column_stride)


def refused(tensors: Shapes) -> str:
    with pytest.raises(CheckpointError) as caught:
        find(tensors)
    return str(caught.value)


def test_what_is_a_plain_weight() -> None:
    found = find_source_weights(
        checkpoint(
            {
                f"{A}.weight": ("F16", (3, 5)),
                f"{A}.bias": ("F16", (3,)),
                "model.norm.weight": ("F32", (5,)),
                "conv.weight": ("F32", (5, 2, 3)),
                "empty.weight": ("F32", (5, 0)),
                f"{B}.weight": ("I64", (3, 5)),
                "position": ("F32", (3, 5)),
            }
        )
    )
    assert [(weight.module, weight.kind, weight.stacked) for weight in found.weights] == [(A, "float", False)]
    (source,) = found.weights[0].sources
    assert (source.rows, source.columns, told(source.weight)) == (3, 5, (1000, "F16", 3, 5, 5, 1))
    assert list(found.unreadable) == [B]
    assert found.owner == {f"{A}.weight": A}


def test_a_stack_of_floats() -> None:
    found = find({STACK: ("BF16", (3, 4, 6)), "other.tensor": ("BF16", (3, 4, 6)), f"{STACK}_bias": ("BF16", (3, 4))})
    assert [(weight.module, weight.kind, weight.stacked) for weight in found] == [(STACK, "float", True)]
    views = [told(source.weight) for source in found[0].sources]
    assert views == [(1000 + 48 * expert, "BF16", 4, 6, 6, 1) for expert in range(3)]
    assert {(source.rows, source.columns) for source in found[0].sources} == {(4, 6)}
    assert find({STACK: ("BF16", (3, 4))}) == []
    assert find({STACK: ("F64", (3, 4, 6))}) == []


def test_nvfp4_in_both_layouts() -> None:
    parts: Shapes = {
        f"{A}.weight": ("U8", (4, 16)),
        f"{A}.weight_scale": ("F8_E4M3", (4, 2)),
        f"{A}.weight_scale_2": ("F32", ()),
        f"{A}.input_scale": ("F32", ()),
        f"{B}.weight_packed": ("U8", (4, 16)),
        f"{B}.weight_scale": ("F8_E4M3", (4, 2)),
        f"{B}.weight_global_scale": ("F32", (1,)),
    }
    first, second = find(parts)
    assert (first.module, first.kind, first.dropped) == (A, "nvfp4", ())
    assert first.belongs == (f"{A}.weight_scale", f"{A}.weight_scale_2", f"{A}.input_scale")
    (source,) = first.sources
    assert (source.rows, source.columns, source.divides) == (4, 32, False)
    assert told(source.weight) == (1000, "U8", 4, 16, 16, 1)
    assert told(source.scale) == (1064, "F8_E4M3", 4, 2, 2, 1)
    assert told(source.global_scale) == (1072, "F32", 1, 1, 1, 1)
    assert told(source.input_scale) == (1076, "F32", 1, 1, 1, 1)
    (source,) = second.sources
    assert (source.divides, source.input_scale, told(source.global_scale)) == (True, None, (1152, "F32", 1, 1, 1, 1))


GRIDS = {
    (): (1, 1), (1,): (1, 1), (4,): (4, 1), (4, 1): (4, 1), (1, 32): (1, 32), (4, 2): (4, 2), (4, 1, 2, 1): (4, 2),
}  # fmt: skip


@pytest.mark.parametrize("shape", GRIDS)
def test_fp8(shape: tuple[int, ...]) -> None:
    (weight,) = find(
        {
            f"{A}.weight": ("F8_E4M3", (4, 32)),
            f"{A}.weight_scale": ("F32", shape),
            f"{A}.input_scale": ("F32", ()),
        }
    )
    rows, columns = GRIDS[shape]
    (source,) = weight.sources
    assert (weight.kind, weight.belongs, weight.dropped) == ("fp8", (f"{A}.weight_scale",), (f"{A}.input_scale",))
    assert told(source.weight) == (1000, "F8_E4M3", 4, 32, 32, 1)
    assert told(source.scale) == (1128, "F32", rows, columns, columns, 1)
    assert (source.global_scale, source.input_scale) == (None, None)


def test_int4_as_bytes() -> None:
    """Eight codes per int32 are four bytes: two codes per byte."""
    (weight,) = find({f"{A}.weight_packed": ("I32", (3, 8)), f"{A}.weight_scale": ("BF16", (3, 2))})
    (source,) = weight.sources
    assert (weight.kind, source.rows, source.columns) == ("int4", 3, 64)
    assert told(source.weight) == (1000, "U8", 3, 32, 32, 1)
    assert told(source.scale) == (1096, "BF16", 3, 2, 2, 1)


def test_stacked_mxfp4() -> None:
    (weight,) = find({f"{STACK}_blocks": ("U8", (2, 3, 4, 16)), f"{STACK}_scales": ("U8", (2, 3, 4))})
    assert (weight.module, weight.kind, weight.stacked) == (STACK, "mxfp4", True)
    assert [told(source.weight) for source in weight.sources] == [
        (1000 + 192 * expert, "U8", 3, 64, 64, 1) for expert in range(2)
    ]
    assert [told(source.scale) for source in weight.sources] == [
        (1384 + 12 * expert, "U8", 3, 4, 4, 1) for expert in range(2)
    ]
    assert {(source.rows, source.columns) for source in weight.sources} == {(3, 128)}


def test_codes_of_another_number_of_axes_are_no_linear_layer() -> None:
    """Under `.weight`, which a convolution is called too; under any other name they are a mistake."""
    scale: Shapes = {f"{A}.weight_scale": ("F32", ())}
    assert find({f"{A}.weight": ("F8_E4M3", (4, 4, 4))} | scale) == []
    assert find({f"{A}.weight": ("F8_E4M3", (4, 0))} | scale) == []
    assert find({f"{A}.weight": ("F8_E4M3", (4,))} | scale) == []
    packed: Shapes = {f"{A}.weight_packed": ("U8", (4, 4, 16)), f"{A}.weight_scale": ("U8", (4, 1))}
    assert refused(packed) == (
        f"{A}.weight_packed: U8 of shape [4, 4, 16] is no weight of mxfp4 (compressed-tensors), whose codes are "
        "[out, in/2]"
    )
    empty: Shapes = {f"{A}.weight_packed": ("U8", (0, 16)), f"{A}.weight_scale": ("U8", (0, 1))}
    assert "U8 of shape [0, 16] is no weight of mxfp4" in refused(empty)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {f"{A}.weight_scale": ("F8_E4M3", (4, 3))},
            f"{A}.weight_scale: {A}.weight of shape [4, 16] needs F8_E4M3 scales of shape [4, 2], got F8_E4M3 [4, 3]",
        ),
        (
            {f"{A}.weight_scale": ("F32", (4, 2))},
            f"{A}.weight_scale: {A}.weight of shape [4, 16] needs F8_E4M3 scales of shape [4, 2], got F32 [4, 2]",
        ),
        ({f"{A}.weight_scale_2": ("F32", (2,))}, f"{A}.weight_scale_2: expected one float, got F32 [2]"),
        ({f"{A}.weight_scale_2": ("F64", ())}, f"{A}.weight_scale_2: expected one float, got F64 []"),
        ({f"{A}.input_scale": ("F32", (1, 1))}, f"{A}.input_scale: expected one float, got F32 [1, 1]"),
    ],
)
def test_parts_of_another_shape_or_dtype(changes: Shapes, message: str) -> None:
    parts: Shapes = {
        f"{A}.weight": ("U8", (4, 16)),
        f"{A}.weight_scale": ("F8_E4M3", (4, 2)),
        f"{A}.weight_scale_2": ("F32", ()),
    }
    assert refused(parts | changes) == message


def test_scales_of_fp8_that_do_not_fit() -> None:
    for scale, message in (
        (
            ("F32", (5,)),
            f"{A}.weight_scale, shape [5], of {A}.weight: 5 scales do not fit an axis of 4 elements: neither one, nor "
            "one per row, nor 128s",
        ),
        (("I32", (4,)), f"{A}.weight_scale: scales of dtype I32 are not known for fp8 (weight_scale)"),
    ):
        assert refused({f"{A}.weight": ("F8_E4M3", (4, 32)), f"{A}.weight_scale": scale}) == message


def test_what_is_missing_is_named() -> None:
    parts: Shapes = {f"{A}.weight_packed": ("U8", (4, 16)), f"{A}.weight_global_scale": ("F32", (1,))}
    assert refused(parts) == (
        f"{A} is quantized (nvfp4 (compressed-tensors)), but {A}.weight_scale is not in the checkpoint"
    )


def test_a_tensor_of_two_weights() -> None:
    scale: Shapes = {f"{A}.weight_scale": ("F8_E4M3", (4, 2)), f"{A}.weight_scale_2": ("F32", ())}
    both = scale | {f"{A}.weight": ("U8", (4, 16)), f"{A}.weight_packed": ("U8", (4, 16))}
    both |= {f"{A}.weight_global_scale": ("F32", (1,))}
    assert refused(both) == f"{A}.weight_scale belongs to both {A} and {A}"


def test_nothing_is_found_before_it_is_added() -> None:
    assert Found() == Found([], {}, {})
    weight = SourceWeight("m", "float", checkpoint({"x": ("F32", (1,))}).tensors["x"], ())
    assert (weight.belongs, weight.dropped, weight.stacked) == ((), (), False)
