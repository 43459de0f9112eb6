"""Device cache of arrays derived from a Method: made once, dropped together with the method."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfbyte.codec.bits import F32
from halfbyte.methods import Method

if TYPE_CHECKING:
    import torch

_TENSORS: weakref.WeakKeyDictionary[Method, dict[tuple[str, str], tuple[torch.Tensor, ...]]] = (
    weakref.WeakKeyDictionary()
)


def derived_tensors(
    method: Method, what: str, device: torch.device, make: Callable[[], tuple[F32, ...]]
) -> tuple[torch.Tensor, ...]:
    """The arrays that `make` derives from the method, on the device; `what` names them among those of the method.

    Methods that hold arrays are equal to themselves alone, so that no method gets another one's tensors.
    """
    import torch

    found = _TENSORS.setdefault(method, {})
    key = (what, str(device))
    if key not in found:
        # A method's own arrays are read-only, which tensors cannot be: a copy.
        found[key] = tuple(torch.from_numpy(array.copy()).to(device) for array in make())
    return found[key]
