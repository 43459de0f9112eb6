"""numpy to torch and back, bit for bit. It does not use `halfbyte.arrays`, so that the peers share no code with us."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np

from conformance.peers.spec import Array

if TYPE_CHECKING:
    import torch

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def to_torch(x: Array) -> torch.Tensor:
    """A contiguous tensor with the same bits; ml_dtypes.bfloat16 becomes torch.bfloat16. Always a copy."""
    import torch

    if x.dtype == BFLOAT16:
        return torch.from_numpy(np.array(x).view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(x))


def to_numpy(x: torch.Tensor) -> Array:
    """An array with the same bits. float8 tensors become bytes. Scalars get shape (1,), as in the vectors."""
    import torch

    tensor = x.detach().contiguous()
    if tensor.dtype == torch.bfloat16:
        array = tensor.view(torch.int16).numpy().view(BFLOAT16)
    elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu):
        array = tensor.view(torch.uint8).numpy()
    else:
        array = tensor.numpy()
    return np.array(array.reshape(array.shape or (1,)))
