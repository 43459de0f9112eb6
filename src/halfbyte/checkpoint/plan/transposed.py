"""Weights stored as [inputs, outputs] in architectures that the table does not have: the bias gives them away."""

from __future__ import annotations

from collections.abc import Sequence

from halfbyte.checkpoint.io.index import Checkpoint
from halfbyte.checkpoint.plan.source_weights import SourceWeight
from halfbyte.models import Model


def transposed_modules(checkpoint: Checkpoint, model: Model, weights: Sequence[SourceWeight]) -> list[str]:
    """Modules whose bias is as long as a row of the weight, not as a column of it: Conv1D, as in GPT-2.

    A square weight does not tell; it counts if another module with the same last part does.
    """
    unknown = [weight for weight in weights if weight.kind == "float" and not model.is_known(weight.module)]
    told = set()
    for weight in unknown:
        bias = checkpoint.tensors.get(f"{weight.module}.bias")
        rows, columns = weight.sources[0].rows, weight.sources[0].columns
        if bias is not None and not weight.stacked and bias.shape == (columns,) and rows != columns:
            told.add(_leaf(weight.module))
    return [weight.module for weight in unknown if not weight.stacked and _leaf(weight.module) in told]


def _leaf(module: str) -> str:
    return module.rpartition(".")[2]
