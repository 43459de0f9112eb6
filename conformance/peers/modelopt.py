"""Model-Optimizer: dynamic NVFP4, static NVFP4 weights with its searches, MXFP4, and MXFP4 to NVFP4.

The static paths fake-quantize with Triton kernels. Without a GPU these run in Triton's interpreter. The interpreter
must be chosen before triton is imported, and the choice then applies to the whole process. So the peer runs in a
separate process.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from conformance.peers.spec import LOW_FIRST, Arrays, Config, Offer, Peer, quiet
from conformance.peers.tensors import to_numpy, to_torch

BLOCK = 16
STATIC_MODES = ("max", "four_over_six", "fp8_sweep", "fp8_sweep_kernel")
LOSSLESS = "quantize_mxfp4_to_nvfp4_lossless"
LOSSY = "quantize_mxfp4_to_nvfp4"

NVFP4_CONVENTIONS = {"nibbles": LOW_FIRST, "scales": "E4M3 linear", "tensor_scale": "decode multiplier"}
MXFP4_CONVENTIONS = {"nibbles": LOW_FIRST, "scales": "E8M0 linear", "tensor_scale": "none"}
CAST_CONVENTIONS = {"nibbles": LOW_FIRST, "tensor_scale": "decode multiplier"}

OFFERS = (
    Offer("nvfp4", {"mode": "nvfp4"}, NVFP4_CONVENTIONS, multiple=1, stacked=True),
    Offer("mxfp4", {"mode": "mxfp4"}, MXFP4_CONVENTIONS, multiple=32, stacked=True),
    *(Offer("nvfp4", {"mode": mode}, NVFP4_CONVENTIONS, slow=True) for mode in STATIC_MODES),
    Offer("mxfp4->nvfp4", {"mode": LOSSY}, CAST_CONVENTIONS, multiple=32, operands="mx"),
    Offer("mxfp4->nvfp4", {"mode": LOSSLESS}, CAST_CONVENTIONS, multiple=32, operands="mx"),
)


@functools.cache
def _process() -> ProcessPoolExecutor:
    context = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_choose_interpreter)


def _choose_interpreter() -> None:
    os.environ["TRITON_INTERPRET"] = "1"


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Run one case in Model-Optimizer's own process."""
    return _process().submit(_run, operands, format, dict(config)).result()


def _run(operands: Arrays, format: str, config: Config) -> Arrays:
    mode = config["mode"]
    if format == "mxfp4->nvfp4":
        return _cast(operands, config)
    if mode in STATIC_MODES:
        return _static(operands, mode)
    return _dynamic(operands) if mode == "nvfp4" else _mxfp4(operands)


def _dynamic(operands: Arrays) -> Arrays:
    with quiet():
        import torch
        from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = to_torch(operands["input"])
    tensor, scales, tensor_scale = NVFP4QTensor.quantize(x, BLOCK)
    results = {
        "codes": to_numpy(tensor._quantized_data),
        "scales": to_numpy(scales),
        "tensor_scale": to_numpy(tensor_scale),
    }
    if x.shape[-1] % BLOCK == 0:  # dequantize cannot undo the padding: it fails to reshape
        decoded = tensor.dequantize(torch.float32, scale=scales, double_scale=tensor_scale, block_sizes={-1: BLOCK})
        results["dequant"] = to_numpy(decoded)
    return results


def _mxfp4(operands: Arrays) -> Arrays:
    with quiet():
        import torch
        from modelopt.torch.quantization.qtensor import MXFP4QTensor

    x = to_torch(operands["input"])
    tensor, scales = MXFP4QTensor.quantize(x, 32)
    decoded = tensor.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
    return {
        "codes": to_numpy(tensor._quantized_data),
        "scales": to_numpy(scales).reshape(*x.shape[:-1], -1),  # the peer stores all blocks in one column
        "dequant": to_numpy(decoded),
    }


def _static(operands: Arrays, mode: str) -> Arrays:
    """Calibrate block amaxes, fake-quantize with them, and export, each with Model-Optimizer's own functions."""
    kernels = _kernels()
    with quiet():
        import torch
        from modelopt.torch.quantization.calib.mse import MseCalibrator, NVFP4MSECalibrator
        from modelopt.torch.quantization.qtensor import NVFP4QTensor
        from modelopt.torch.quantization.utils import reduce_block_amax

    x = to_torch(operands["input"])
    amax = reduce_block_amax(x, block_sizes={-1: BLOCK}).float()
    four_six = mode == "four_over_six"
    quantizer = SimpleNamespace(
        block_sizes={-1: BLOCK, "four_over_six": four_six}, global_amax=amax.max().float(), _amax=amax
    )
    blocks = x.reshape(-1, BLOCK)

    def fake_quantize(values: Any, block_amax: Any) -> Any:
        return kernels.fake_quantize(values, block_amax, quantizer.global_amax, True, 256.0 if four_six else 448.0)

    flat = amax.reshape(-1, 1)
    if mode == "fp8_sweep_kernel":
        quantizer._amax = kernels.sweep(blocks, quantizer.global_amax).reshape(amax.shape)
    elif mode != "max":
        calibrator = (
            # The preset of the 4/6 recipe: amax multipliers 1.0 and 1.5.
            MseCalibrator(flat, 0, step_size=0.5, start_multiplier=1.0, stop_multiplier=1.5, quant_func=fake_quantize)
            if four_six
            else NVFP4MSECalibrator(flat, quantizer.global_amax, 0, quant_func=fake_quantize)
        )
        calibrator.collect(blocks)
        quantizer._amax = calibrator.compute_amax().reshape(amax.shape)
    scales, tensor_scale = NVFP4QTensor.get_weights_scaling_factor_from_quantizer(quantizer, x)
    tensor, _, _ = NVFP4QTensor.quantize(x, BLOCK, scales, tensor_scale)
    copy = fake_quantize(blocks.to(torch.float32), quantizer._amax.reshape(-1, 1))
    return {
        "codes": to_numpy(tensor._quantized_data),
        "scales": to_numpy(scales),
        "tensor_scale": to_numpy(tensor_scale),
        "block_amax": to_numpy(quantizer._amax),
        "fake_quant": to_numpy(copy.reshape(x.shape)),
    }


@functools.cache
def _kernels() -> SimpleNamespace:
    """The two Triton kernels, callable on CPU tensors in the interpreter."""
    with quiet():
        import torch
        from modelopt.torch.kernels.quantization.common import nvfp4_quant
        from modelopt.torch.kernels.quantization.gemm import fp4_kernel, nvfp4_fp8_sweep

    # The interpreter has no libdevice; isnan is the only libdevice function that these kernels call.
    nvfp4_quant.libdevice = SimpleNamespace(isnan=lambda value: value != value)

    def on_cpu() -> ExitStack:
        stack = ExitStack()
        stack.enter_context(mock.patch.object(torch.cuda, "device", return_value=nullcontext()))
        stack.enter_context(quiet())
        stack.enter_context(np.errstate(all="ignore"))
        return stack

    def fake_quantize(x: Any, amax: Any, global_amax: Any, quantize_scales: bool, normalization: float) -> Any:
        with on_cpu():
            return fp4_kernel.static_blockwise_fp4_fake_quant(x, amax, global_amax, quantize_scales, normalization)

    def sweep(blocks: Any, global_amax: Any) -> Any:
        count = blocks.shape[0]
        best = torch.empty(count, dtype=torch.float32)
        candidates = nvfp4_fp8_sweep.fp8_scale_candidates(blocks.device).float()
        tile = 16  # the first of three sizes that the autotuner would time on a GPU; it does not change the blocks
        with on_cpu():
            nvfp4_fp8_sweep._fp8_scale_sweep_kernel.fn[(-(-count // tile),)](
                blocks.contiguous().view(-1),
                candidates,
                global_amax.reshape(1),
                best,
                count,
                BLOCK_SIZE=BLOCK,
                NUM_CANDIDATES=candidates.numel(),
                BLOCKS_PER_PROGRAM=tile,
            )
        return best

    return SimpleNamespace(fake_quantize=fake_quantize, sweep=sweep)


def _cast(operands: Arrays, config: Config) -> Arrays:
    """Cast MXFP4 checkpoints to NVFP4: through bfloat16, or in closed form."""
    with quiet():
        from modelopt.torch.export import shard_cast_utils
        from modelopt.torch.quantization.utils import numeric_utils

    codes, scales = to_torch(operands["mx_codes"]), to_torch(operands["mx_scales"])
    if config["mode"] == LOSSY:
        packed, byte, tensor_scale, _ = shard_cast_utils.quantize_mxfp4_to_nvfp4(codes, scales, None, "cpu")
        return {"codes": to_numpy(packed), "scales": to_numpy(byte), "tensor_scale": to_numpy(tensor_scale)}
    global_amax, info = numeric_utils.mxfp4_to_nvfp4_global_amax(scales)
    packed, byte, tensor_scale, blocks, lossless = shard_cast_utils.quantize_mxfp4_to_nvfp4_lossless(
        codes, scales, config.get("k_max", info["k_max"]), "cpu"
    )
    per_block = numeric_utils.mxfp4_to_nvfp4_per_block_amax(codes.reshape(*scales.shape, 16), scales)
    return {
        "codes": to_numpy(packed),
        "scales": to_numpy(byte),
        "tensor_scale": to_numpy(tensor_scale),
        "global_amax": np.array([global_amax], np.float64),
        "per_block_amax": to_numpy(per_block),
        "n_blocks": np.array([blocks], np.int64),
        "n_lossless": np.array([lossless], np.int64),
    }


PEER = Peer("modelopt", "nvidia-modelopt", OFFERS, run)
