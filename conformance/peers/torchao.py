"""torchao: `NVFP4Tensor.to_nvfp4` with one or two levels of scales, `MXTensor.to_mx` with four scaling modes."""

from __future__ import annotations

import logging

import numpy as np

from conformance.peers.spec import LOW_FIRST, Arrays, Config, Offer, Peer, quiet
from conformance.peers.tensors import to_numpy, to_torch

DTYPES = ("bf16", "fp32")
MODES = ("floor", "even", "ceil", "rceil")


def _nvfp4(two_level: bool, swizzled: bool) -> Offer:
    return Offer(
        "nvfp4",
        {"mode": "nvfp4", "two_level": two_level, **({"swizzled": True} if swizzled else {})},
        {
            "nibbles": LOW_FIRST,
            "scales": "E4M3 blocked 128x4" if swizzled else "E4M3 linear",
            "tensor_scale": "decode multiplier" if two_level else "none",
        },
        DTYPES,
        stacked=not swizzled,
    )


def _mx(scaling_mode: str, swizzled: bool = False, format: str = "mxfp4") -> Offer:
    return Offer(
        format,
        {"mode": "mx", "scaling_mode": scaling_mode, **({"swizzled": True} if swizzled else {})},
        {
            "nibbles": LOW_FIRST,
            "scales": "E8M0 blocked 128x4" if swizzled else "E8M0 linear",
            "tensor_scale": "none",
        },
        DTYPES,
        multiple=32,
        stacked=not swizzled,
    )


OFFERS = (
    _nvfp4(True, False),
    _nvfp4(False, False),
    _nvfp4(True, True),
    *(_mx(mode) for mode in MODES),
    _mx("rceil", swizzled=True),
    *(_mx(mode, format="mxfp8") for mode in MODES),  # E4M3 elements; the golden vectors have none
)


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Quantize and decode with torchao. Scale bytes keep torchao's order, and swizzled ones keep its shape."""
    with quiet():
        logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao 0.18 registers enums in the old way
        import torch
        from torchao.prototype.mx_formats.config import ScaleCalculationMode
        from torchao.prototype.mx_formats.mx_tensor import MXTensor
        from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    x = to_torch(operands["input"])
    swizzled = bool(config.get("swizzled", False))
    results: Arrays = {}
    if config["mode"] == "nvfp4":
        tensor_scale = per_tensor_amax_to_scale(x.abs().max()) if config["two_level"] else None
        tensor = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale, is_swizzled_scales=swizzled)
        if tensor_scale is not None:
            results["tensor_scale"] = to_numpy(tensor_scale)
        decoded = tensor.dequantize(torch.float32)
    else:
        element = torch.float8_e4m3fn if format == "mxfp8" else torch.float4_e2m1fn_x2
        mode = ScaleCalculationMode(config["scaling_mode"])
        tensor = MXTensor.to_mx(x, element, 32, mode, is_swizzled_scales=swizzled)
        decoded = tensor.dequantize(torch.float32)
    results["codes"] = to_numpy(tensor.qdata.view(torch.uint8))
    results["scales"] = to_numpy(tensor.scale)
    if not (swizzled and config["mode"] == "mx"):  # the golden swizzled MX case holds no decoded tensor
        results["dequant"] = to_numpy(decoded)
    return results


def unstable(operands: Arrays, format: str, config: Config) -> tuple[str, ...]:
    """Codes of y = NaN: they come from the bits of the NaN, which depend on the instruction that produced it.

    If the scale is NaN, the decoded values are NaN for any code. With two levels, 1/p overflows for very small tensors;
    then zeros become 0·Inf although the scale is a number. In MX the code of a NaN in the input is defined, but an Inf
    in the same block becomes Inf/Inf.
    """
    x = np.abs(operands["input"].astype(np.float32))
    if config["mode"] == "mx":
        blocks = x.reshape(-1, 32)
        return ("codes",) if (np.isnan(blocks).any(axis=1) & np.isinf(blocks).any(axis=1)).any() else ()
    if not config["two_level"]:
        return ("codes",) if np.isnan(x).any() else ()
    amax = x.max()
    if not np.isfinite(amax) or amax == 0:
        return ("codes",)
    overflows = float(np.float32(amax / np.float32(2688))) * float(np.finfo(np.float32).max) < 1
    return ("codes", "dequant") if overflows and not x.all() else ()


PEER = Peer("torchao", "torchao", OFFERS, run, unstable)
