"""Experts that a checkpoint stacks in one tensor: taken apart, or turned so that rows are outputs.

The orientation comes from the family, never from the shape; sizes are checked against config.json.
"""

from __future__ import annotations

from dataclasses import replace

from halfbyte.checkpoint.io.decode import Source, View
from halfbyte.checkpoint.io.index import Checkpoint
from halfbyte.checkpoint.plan.source_weights import Weight
from halfbyte.errors import CheckpointError
from halfbyte.models.families import Family


def orient(weight: Weight, family: Family, checkpoint: Checkpoint) -> Weight:
    """The stacked weight with sources of shape (outputs, inputs). Packed experts (MXFP4) lie that way already."""
    if weight.kind == "float" and family.stacking in ("transposed", "interleaved"):
        weight = replace(weight, sources=tuple(_transpose(source) for source in weight.sources))
    _check_sizes(weight, family, checkpoint)
    return weight


def split(weight: Weight, family: Family) -> list[Weight]:
    """One weight an expert, gate and up apart, under the names `experts.E.gate_proj` and so on. Takes oriented ones."""
    prefix, _, name = weight.module.rpartition(".")
    result = []
    for expert, source in enumerate(weight.sources):
        if name == "down_proj":
            parts = {"down_proj": source}
        else:
            half = source.rows // 2
            step = 2 if family.stacking == "interleaved" else 1
            second = 1 if step == 2 else half
            parts = {"gate_proj": _rows(source, 0, half, step), "up_proj": _rows(source, second, half, step)}
        result += [
            Weight(f"{prefix}.{expert}.{end}", weight.kind, weight.tensor, (part,), weight.belongs)
            for end, part in parts.items()
        ]
    return result


def _transpose(source: Source) -> Source:
    view = source.weight
    turned = replace(
        view,
        rows=view.columns,
        columns=view.rows,
        row_stride=view.column_stride,
        column_stride=view.row_stride,
    )
    return replace(source, rows=source.columns, columns=source.rows, weight=turned)


def _rows(source: Source, first: int, count: int, step: int) -> Source:
    """`count` rows of a source from row `first` on, every `step`-th."""
    scale = None if source.scale is None else _view_rows(source.scale, first, count, step)
    return replace(source, rows=count, weight=_view_rows(source.weight, first, count, step), scale=scale)


def _view_rows(view: View, first: int, count: int, step: int) -> View:
    size = {"F32": 4, "F16": 2, "BF16": 2}.get(view.dtype, 1)
    return replace(
        view, offset=view.offset + first * view.row_stride * size, rows=count, row_stride=view.row_stride * step
    )


def _check_sizes(weight: Weight, family: Family, checkpoint: Checkpoint) -> None:
    """Rows and columns against hidden_size and the experts' intermediate size, where config.json has them."""
    hidden = checkpoint.setting("hidden_size")
    inner = checkpoint.setting("moe_intermediate_size") or checkpoint.setting("intermediate_size")
    source = weight.sources[0]
    down = weight.module.endswith("down_proj")
    if down:
        wanted = (hidden, inner)
    else:
        wanted = (None if inner is None else 2 * inner, hidden)
    given = (source.rows, source.columns)
    if not down and source.rows % 2:
        raise CheckpointError(f"{weight.tensor.name}: {source.rows} rows of gate and up cannot be halved")
    for size, expected in zip(given, wanted, strict=True):
        if expected is not None and size != expected:
            raise CheckpointError(
                f"{weight.tensor.name}, shape {list(weight.tensor.info.shape)}: {family.name} experts should be "
                f"{list(wanted)} (outputs, inputs) by config.json, but are {list(given)}"
            )
