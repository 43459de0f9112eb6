"""Stacked experts in a plan: transposed so that rows are outputs, or split into single weights. No data is read.

The orientation comes from the model, never from the shape; sizes are checked against config.json.
"""

from __future__ import annotations

from dataclasses import replace

from halfbyte.checkpoint.io.views import NUMPY, SourceMatrix, View
from halfbyte.checkpoint.plan.source_weights import SourceWeight
from halfbyte.errors import CheckpointError
from halfbyte.models import Model
from halfbyte.models.experts import expert_module


def orient(weight: SourceWeight, model: Model) -> SourceWeight:
    """The stacked weight with sources of shape (outputs, inputs). Packed experts (MXFP4) lie that way already."""
    if weight.kind == "float" and model.lies_transposed(weight.module, weight.tensor.shape):
        weight = replace(weight, sources=tuple(_transpose(source) for source in weight.sources))
    _check_sizes(weight, model)
    return weight


def split(weight: SourceWeight, model: Model) -> list[SourceWeight]:
    """One weight per expert and projection, under the names `experts.E.gate_proj` and so on. Takes an oriented one."""
    return [
        SourceWeight(
            expert_module(weight.module, expert, projection),
            weight.kind,
            weight.tensor,
            (_rows(source, rows),),
            weight.belongs,
        )
        for expert, source in enumerate(weight.sources)
        for projection, rows in model.projections(weight.module, source.rows).items()
    ]


def _transpose(source: SourceMatrix) -> SourceMatrix:
    view = source.weight
    turned = replace(
        view,
        rows=view.columns,
        columns=view.rows,
        row_stride=view.column_stride,
        column_stride=view.row_stride,
    )
    return replace(source, rows=source.columns, columns=source.rows, weight=turned)


def _rows(source: SourceMatrix, rows: slice) -> SourceMatrix:
    """Some rows of a source."""
    scale = None if source.scale is None else _view_rows(source.scale, rows)
    weight = _view_rows(source.weight, rows)
    return replace(source, rows=weight.rows, weight=weight, scale=scale)


def _view_rows(view: View, rows: slice) -> View:
    start, stop, step = rows.indices(view.rows)
    return replace(
        view,
        offset=view.offset + start * view.row_stride * NUMPY[view.dtype].itemsize,
        rows=len(range(start, stop, step)),
        row_stride=view.row_stride * step,
    )


def _check_sizes(weight: SourceWeight, model: Model) -> None:
    """Rows and columns against hidden_size and the experts' intermediate size, where config.json has them."""
    source = weight.sources[0]
    wanted, given = model.stack_sizes(weight.module), (source.rows, source.columns)
    if not weight.module.endswith("down_proj") and source.rows % 2:
        raise CheckpointError(f"{weight.tensor.name}: {source.rows} rows of gate and up cannot be halved")
    for size, expected in zip(given, wanted, strict=True):
        if expected is not None and size != expected:
            raise CheckpointError(
                f"{weight.tensor.name}, shape {list(weight.tensor.info.shape)}: {model.family.name} experts should be "
                f"{list(wanted)} (outputs, inputs) by config.json, but are {list(given)}"
            )
