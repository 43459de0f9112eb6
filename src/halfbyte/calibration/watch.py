"""What goes into the linear layers of a running model: seen, and replaced, where the product is computed.

Stacked experts are no modules with hooks: each is a view into one parameter. So products are watched instead, and a
weight is known by its place in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Visit = Callable[[str, torch.Tensor, bool], torch.Tensor | None]
"""(module, inputs (tokens, K), whether the same inputs were seen just before) → inputs to use instead, or None."""

PRODUCTS = {
    torch.nn.functional.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.mm,
    torch.Tensor.mm,
}


class StopForwardError(Exception):
    """The rest of a layer is not needed."""


class Watch(TorchFunctionMode):
    """Calls `visit` for every product with a known weight."""

    def __init__(self, weights: Mapping[tuple[int, int], tuple[str, ...]], visit: Visit) -> None:
        super().__init__()
        self.weights = weights
        """(storage, offset) of a weight → the linear layers that it holds."""
        self.visit = visit
        self._last: tuple[torch.Tensor, torch.Tensor | None] | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in PRODUCTS and len(args) >= 2 and isinstance(args[1], torch.Tensor):
            weight = args[1]
            modules = self.weights.get((weight.untyped_storage().data_ptr(), int(weight.storage_offset())), ())
            x = args[0]
            if modules and x.numel():
                again = self._last is not None and self._last[0] is x
                replaced = self._last[1] if again and self._last is not None else None
                for module in modules:
                    with torch._C.DisableTorchFunction():
                        found = self.visit(module, x.reshape(-1, x.shape[-1]), again)
                    replaced = found.reshape(x.shape) if found is not None else replaced
                    again = True
                self._last = (x, replaced)
                if replaced is not None:
                    args = (replaced, *args[1:])
        return function(*args, **(kwargs or {}))
