"""Launches of the searches over power-of-two scales, behind the plain kernel that has written codes and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from halfbyte.backends.gpu.exact_search import hessian_on, launch_descent, weights_on
from halfbyte.backends.gpu.launch import ROWS, SEARCH_LANES, assembly, options
from halfbyte.backends.gpu.peer_searches import improve_as_qwantize
from halfbyte.backends.gpu.rules import DTYPE_NUMBERS, rounding_numbers
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import MXRule
from halfbyte.formats import E2M1
from halfbyte.methods import Hessian, Optimal
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch

UNIFORM, WEIGHTED, HESSIAN = 0, 1, 2


def improve_mx(
    x: torch.Tensor, rule: MXRule, request: Request, codes: torch.Tensor, scales: torch.Tensor, swizzled: bool
) -> None:
    """Replace codes and bytes of the amax method by those of the search that the request asks for."""
    import torch

    from halfbyte.backends.gpu.triton import mx_search as mx_search_kernels

    block, element, method = request.format.block, request.format.element, request.method
    rows, columns = x.shape[0], x.shape[1] // block
    words, row_quads = x.view(torch.int32), x.stride(0) * x.element_size() // 16
    outputs = codes.view(torch.int32), scales
    shared: dict[str, int | float | bool] = {
        "B": SEARCH_LANES, "N": block, "SWIZZLED": swizzled, **options(), "num_warps": 1,
    }  # fmt: skip
    if rule.scale_search is not None:
        common = shared | {"MAP": ROWS, "ASM": assembly(x.device)}
        programs = ceil_div(rows * columns, SEARCH_LANES)
        improve_as_qwantize(words, outputs, (rows * columns, columns, row_quads), programs, request, common)
        return
    numbers = bounds = words.new_zeros(1)
    objective, step = UNIFORM, 0
    if isinstance(method, Hessian):
        (numbers, bounds), objective = hessian_on(method, x.device), HESSIAN
        step = bounds.shape[1]
    elif isinstance(method, Optimal) and method.channel_weights is not None:
        numbers, objective = weights_on(method, columns * block, x.device), WEIGHTED
    dtype = DTYPE_NUMBERS[request.dtype]
    mx_search_kernels.improve_mx[(columns * ceil_div(rows, SEARCH_LANES),)](
        words, *outputs, numbers, bounds, step, rows, columns, row_quads, DTYPE=dtype, OBJECTIVE=objective,
        WIDE=element != E2M1, NEAREST=rule.nearest is not None,
        ROUNDED=rule.rounds_quotient and rule.statistics == "input", **rounding_numbers(rule.rounding, element),
        **shared,
    )  # fmt: skip
    if isinstance(method, Hessian) and method.codes == "descent":
        launch_descent(words, (*outputs, bounds), numbers, (rows, columns, row_quads, 1), request, 0, swizzled)
