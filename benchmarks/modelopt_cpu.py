"""Model-Optimizer's rounding to NVFP4 without a GPU: its own eager functions where it calls Triton kernels.

Calibration, searches and GPTQ of Model-Optimizer are torch and run anywhere. What rounds to FP4 does not:
`static_blockwise_fp4_fake_quant` (block scales by calibration: mse, local Hessian, GPTQ) and `fp4_fake_quant_block` (by
the block's amax: max, AWQ) are Triton kernels, and importing them is tied to a GPU. Here stand in

- for the first, `compute_fp4_scales` (which the kernel's launcher calls), `NVFP4QTensor._cast_fp4` and its table of
  values: the same scales, quotients, codes and products. Golden cases of the kernel in Triton's interpreter hold the
  values equal; only a zero has no sign.
- for the second, `NVFP4QTensor.quantize` and `dequantize`, which its export writes and reads. They differ from the
  kernel where a block's scale is below 1e-5 (the kernel makes the block zero) or below 2⁻⁹ of the tensor's.
- for `gptq_blockwise_update`, itself. It rounds the whole weight for every column and keeps one column of it; here
  that column alone is rounded, with the same scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

BLOCK = 16


def static_fake_quant(
    x: torch.Tensor,
    amax: torch.Tensor,
    global_amax: torch.Tensor | None = None,
    quantize_block_scales: bool = True,
    fp8_max_for_normalization: float = 448.0,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x rounded under block amaxes that are given. Equal runs of x's elements, as many as amaxes, are the blocks."""
    from modelopt.torch.kernels.quantization.gemm.fp4_kernel import compute_fp4_scales
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    scale = compute_fp4_scales(amax, global_amax, quantize_block_scales, fp8_max_for_normalization).reshape(-1, 1)
    blocks = x.float().reshape(len(scale), -1)
    codes = NVFP4QTensor._cast_fp4(blocks / torch.where(scale == 0, 1.0, scale))
    found: torch.Tensor = NVFP4QTensor.get_e2m1_values(x.device)[codes.long()] * scale
    return found.reshape(x.shape).to(out_dtype or x.dtype)


def dynamic_fake_quant(
    x: torch.Tensor, block: int, amax: torch.Tensor, bits: int, exponent: int, scale_bits: int, scale_exponent: int
) -> torch.Tensor:
    """x rounded under the amaxes of its blocks, as the export writes it."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    if (bits, exponent, scale_bits, scale_exponent) != (4, 2, 8, 4):
        raise NotImplementedError(f"E{exponent} in {bits} bits with scales in {scale_bits} is not NVFP4")
    whole = x.float()
    tensor, scales, tensor_scale = NVFP4QTensor.quantize(whole, block, None, amax.float().amax() / (6 * 448))
    found = tensor.dequantize(torch.float32, scale=scales, double_scale=tensor_scale, block_sizes={-1: block})
    return torch.as_tensor(found, dtype=x.dtype)


class Columns:
    """A weight as Model-Optimizer's quantizer for static scales rounds it; a column is rounded when it is asked for."""

    def __init__(self, weight: torch.Tensor, quantizer: Any) -> None:
        from modelopt.torch.quantization.utils.numeric_utils import fp8_max_for_normalization

        self.weight, self.global_amax = weight, quantizer.global_amax
        self.amax = quantizer.amax.reshape(len(weight), -1)
        self.largest = fp8_max_for_normalization(quantizer)
        self.known: dict[int, torch.Tensor] = {}

    def __getitem__(self, place: tuple[slice, int]) -> torch.Tensor:
        rows, column = place
        if column not in self.known:
            amax, one = self.amax[:, column // BLOCK], self.weight[:, column : column + 1]
            self.known[column] = static_fake_quant(one, amax, self.global_amax, True, self.largest)[:, 0]
        return self.known[column][rows]


def by_columns(update: Callable[..., None]) -> Callable[..., None]:
    """`gptq_blockwise_update`, which rounds the columns that it looks at, and these before they change."""

    def run(weight: torch.Tensor, h_inv: torch.Tensor, block_size: int, quantizer: Any) -> None:
        update(weight, h_inv, block_size, lambda whole: Columns(whole, quantizer))

    return run


@contextmanager
def on_cpu() -> Iterator[None]:
    """Model-Optimizer with these functions in place of its kernels, as long as the block lasts."""
    from modelopt.torch.quantization import tensor_quant
    from modelopt.torch.quantization.utils import calib_utils

    kernels = SimpleNamespace(IS_AVAILABLE=True, static_blockwise_fp4_fake_quant=static_fake_quant)
    with (
        mock.patch.object(tensor_quant, "triton_kernel", kernels),
        mock.patch.object(tensor_quant, "dynamic_block_quantize_op", dynamic_fake_quant),
        mock.patch.object(calib_utils, "gptq_blockwise_update", by_columns(calib_utils.gptq_blockwise_update)),
    ):
        yield
