"""error(): how far a quantized tensor is from the tensor that it stands for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from halfbyte.arrays import Array, check_dense, is_torch, to_numpy
from halfbyte.errors import InputError, UnsupportedError
from halfbyte.foreign_arrays import imported, needs_conversion
from halfbyte.quantize import dequantize
from halfbyte.subnormals import are_flushed, subnormals_kept
from halfbyte.types import QuantizedTensor


@dataclass(frozen=True, eq=False)
class QuantizationError:
    """The distance between a tensor and what its quantized form decodes to; sums are float64."""

    relative: float
    """sqrt(squared / sum of x²): the relative root mean square error. 0 if both are zero, inf if only x is."""
    snr_db: float
    """Signal to noise ratio in decibels, -20·log10(relative); inf if nothing is lost."""
    squared: float
    """Sum of squared errors."""
    largest: float
    """The largest error of one element."""
    worst_block: tuple[int, ...]
    """Index of the block with the largest squared error, into `block_squared`; the first of equals. () if empty."""
    worst_block_squared: float
    """Its squared error."""
    block_squared: Array
    """Sum of squared errors per block, float64, in the shape of q.scales."""

    def __repr__(self) -> str:
        return (
            f"QuantizationError(relative={self.relative:.6g}, snr_db={self.snr_db:.6g}, squared={self.squared:.6g}, "
            f"largest={self.largest:.6g}, worst_block={self.worst_block}, "
            f"worst_block_squared={self.worst_block_squared:.6g})"
        )


def error(q: QuantizedTensor, x: Array) -> QuantizationError:
    """Measure how far q's values are from x: relative, as a ratio in decibels, by block, and the worst block.

    Values are decoded to float32 and compared in float64, on q's device; the numbers are then read from it. NaN or Inf
    in x or q make the sums that hold them NaN or Inf, and a block with NaN is the worst one.

    q: the quantized tensor. x: the tensor of the same shape, of any dtype that quantize takes.

    >>> import torch, halfbyte as hb
    >>> x = torch.linspace(-3, 3, 64).reshape(2, 32)
    >>> found = error(hb.quantize(x, "nvfp4"), x)
    >>> f"{found.relative:.3f}", f"{found.snr_db:.1f} dB", found.worst_block, found.block_squared.shape
    ('0.107', '19.4 dB', (0, 0), torch.Size([2, 2]))
    """
    if not isinstance(q, QuantizedTensor):
        raise InputError(f"error takes a QuantizedTensor and a tensor, not {type(q).__name__} first")
    if are_flushed():
        with subnormals_kept():
            return error(q, x)
    if q.contract.transform.hadamard:
        raise UnsupportedError(f"{q.contract} rotates the tensor, so its decoded values do not stand for x")
    if needs_conversion(x) and not is_torch(x) and not isinstance(x, np.ndarray):
        x = imported(x)
    if not hasattr(x, "shape") or tuple(x.shape) != q.shape:
        given = f"has shape {tuple(x.shape)}" if hasattr(x, "shape") else f"is {type(x).__name__}"
        raise InputError(f"x {given}, but q has shape {q.shape}; give the tensor that q stands for")
    if not (is_torch(x) or isinstance(x, np.ndarray)):
        raise InputError(f"x is {type(x).__name__}, not an array; give the tensor that q stands for")
    if "complex" in str(x.dtype):
        raise InputError(f"x is {x.dtype}, but the values of q are real")
    if is_torch(x):
        check_dense(x)
    decoded: Any = dequantize(q)
    wide: Any
    if is_torch(decoded):
        import torch

        source = x.detach() if is_torch(x) else torch.from_numpy(_float64(x))
        wide = source.to(decoded.device, torch.float64)
        decoded = decoded.double()
    else:
        wide, decoded = _float64(x), decoded.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        return _measured(q, decoded - wide, wide)


def _float64(x: Array) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The values of x in numpy, widened exactly."""
    try:
        if is_torch(x):
            import torch

            return x.detach().to(torch.float64).cpu().numpy()
        return to_numpy(x).astype(np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"x of dtype {x.dtype} holds no numbers to compare with: {error}") from error


def _measured(q: QuantizedTensor, difference: Any, x: Any) -> QuantizationError:
    shape, block = q.shape, q.format.block
    columns = -(-shape[-1] // block)
    squares = difference * difference
    padding = columns * block - shape[-1]
    if padding:
        last = squares[..., (columns - 1) * block :].sum(-1)[..., None]
        whole = squares[..., : (columns - 1) * block].reshape(*shape[:-1], columns - 1, block).sum(-1)
        blocks = _joined(whole, last)
    else:
        blocks = squares.reshape(*shape[:-1], columns, block).sum(-1)
    squared, power = float(blocks.sum()), float((x * x).sum())
    relative = 0.0 if squared == 0 else math.inf if power == 0 else math.sqrt(squared / power)
    if not math.prod(shape):
        return QuantizationError(0.0, math.inf, 0.0, 0.0, (), 0.0, blocks)
    worst = int(blocks.reshape(-1).argmax())
    index = tuple(int(i) for i in np.unravel_index(worst, tuple(blocks.shape)))
    ratio = math.inf if relative == 0 else -20 * math.log10(relative) if math.isfinite(relative) else -relative
    return QuantizationError(
        relative, ratio, squared, float(abs(difference).max()), index, float(blocks[index]), blocks
    )


def _joined(whole: Any, last: Any) -> Any:
    """The sums of whole blocks and of the last, shorter one."""
    if is_torch(whole):
        import torch

        return torch.cat([whole, last], -1)
    return np.concatenate([whole, last], -1)
