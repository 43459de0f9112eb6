"""What the reference makes of some rows of a tensor, under the tensor scale that the whole of it has."""

from __future__ import annotations

from typing import Any

import torch

import halfbyte as hb
from halfbyte.backends.headroom import DEFAULT, four_six_headrooms
from halfbyte.contracts import NVFP4Rule, get_contract
from halfbyte.testing import find_difference


def rows_agree(got: hb.QuantizedTensor, x: torch.Tensor, rows: slice, **options: Any) -> bool:
    """Whether codes and scales of some rows are those of the reference, for one of the headrooms that may be chosen.

    options: those of the call that gave `got`. Which headroom is the right one is not asked: that takes all rows.
    """
    format = hb.get_format(options["format"])
    rule = get_contract(options.get("contract"), format).rule(format)
    given: list[dict[str, Any]] = [{}]
    if isinstance(rule, NVFP4Rule) and rule.stored is not None:
        amax = float(x.abs().max())
        given = [{"global_amax": amax * headroom} for headroom in sorted({*DEFAULT, *four_six_headrooms(rule)})]
    return any(_agrees(got, hb.quantize(x[rows].cpu(), **options, **one, backend="reference"), rows) for one in given)


def _agrees(got: hb.QuantizedTensor, expected: hb.QuantizedTensor, rows: slice) -> bool:
    for part in ("codes", "scales"):
        mine: Any = getattr(got, part)
        if find_difference(mine[rows].cpu(), getattr(expected, part)) is not None:
            return False
    if expected.stored_scale is None:
        return True
    return find_difference(torch.as_tensor(got.stored_scale).cpu(), expected.stored_scale) is None
