"""qwantize: naive, optimal and Hessian-weighted optimal scales for NVFP4 and MXFP4.

qwantize takes blocks on the last axis and returns scales and values. The driver packs both.
"""

from __future__ import annotations

import numpy as np

from conformance.peers.spec import Array, Arrays, Config, Offer, Peer, codes_of, pack_nibbles, quiet
from conformance.peers.tensors import to_numpy, to_torch

BLOCKS = {"nvfp4": 16, "mxfp4": 32}


def _offer(format: str, name: str) -> Offer:
    hessian = name == "optimal_hessian"
    return Offer(
        format,
        {"mode": f"{format}/{name}", **({"act_dist": "gauss", "tokens": 48} if hessian else {})},
        {
            "nibbles": "low nibble = even index (packed by the generator: the peer returns values)",
            "scales": "E4M3 linear" if format == "nvfp4" else "E8M0 linear",
            "tensor_scale": "none",
        },
        multiple=BLOCKS[format],
        operands="activations" if hessian else "input",
        slow=name != "naive",
    )


OFFERS = tuple(_offer(format, name) for format in BLOCKS for name in ("naive", "optimal", "optimal_hessian"))


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Quantize a matrix block by block, and pack the returned values."""
    with quiet():
        import qwantize
        import torch

    x = to_torch(operands["input"])
    x = x.reshape(*x.shape[:-1], -1, BLOCKS[format])
    function = getattr(qwantize, config["mode"].replace("/", "_"))
    given = {"X": to_torch(operands["activations"])} if "activations" in operands else {}
    scales, values, decoded = function(x, return_dequant=True, **given)
    if format == "nvfp4":
        scale_bytes = to_numpy(scales.to(torch.float8_e4m3fn))  # exact: the scales are E4M3 values
    else:
        scale_bytes = _exponent_bytes(to_numpy(scales))
    return {
        "codes": pack_nibbles(codes_of(to_numpy(values.flatten(-2)))),
        "scales": scale_bytes,
        "dequant": to_numpy(decoded.flatten(-2)),
    }


def _exponent_bytes(scales: Array) -> Array:
    """E8M0 bytes of powers of two; a NaN scale has no byte and is written as 0, as in the golden vectors."""
    finite = np.isfinite(scales)
    return np.where(finite, np.frexp(np.where(finite, scales, 1))[1] - 1 + 127, 0).astype(np.uint8)


def unstable(operands: Arrays, format: str, config: Config) -> tuple[str, ...]:
    """Decoded blocks with a NaN scale: the vectors have no E8M0 byte for it, so the decoded values are not defined."""
    return ("dequant",) if format == "mxfp4" and np.isnan(operands["input"].astype(np.float32)).any() else ()


PEER = Peer("qwantize", "qwantize", OFFERS, run, unstable)
