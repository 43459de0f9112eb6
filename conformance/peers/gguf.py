"""gguf: MXFP4 both ways, NVFP4 decoding, and the float to scale function of its NVFP4."""

from __future__ import annotations

import numpy as np

from conformance.peers.spec import Array, Arrays, Config, Offer, Peer, quiet

DECODE_NVFP4 = "nvfp4 dequantize (the package has no NVFP4 quantizer)"
SCALE_TABLE = "NVFP4.fp32_to_ue4m3"

OFFERS = (
    Offer(
        "mxfp4",
        {"mode": "mxfp4"},
        {
            "nibbles": "half split: byte j of a block holds element j (low) and j+16 (high)",
            "scales": "E8M0, stored in front of each 16 code bytes",
            "tensor_scale": "none",
        },
        multiple=32,
    ),
    Offer(
        "nvfp4",
        {"mode": DECODE_NVFP4},
        {
            "nibbles": "64-element block: 4 scale bytes, then 4x8 code bytes; "
            "byte j of a 16-group holds element j (low) and j+8 (high)",
            "tensor_scale": "none",
        },
        multiple=64,
        operands="blocks",
    ),
    Offer("nvfp4", {"mode": SCALE_TABLE}, operands="floats"),
)

BLOCK_BYTES = 17


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Quantize float32 rows, or decode blocks. gguf takes float32, so narrower operands are widened first (exact)."""
    with quiet():
        from gguf import GGMLQuantizationType
        from gguf.quants import NVFP4, dequantize, quantize

    if config["mode"] == DECODE_NVFP4:
        return {"dequant": dequantize(operands["blocks"], GGMLQuantizationType.NVFP4)}
    with np.errstate(all="ignore"), quiet():
        if config["mode"] == SCALE_TABLE:
            return {"scales": NVFP4.fp32_to_ue4m3(operands["input"])}
        blocks: Array = quantize(operands["input"].astype(np.float32), GGMLQuantizationType.MXFP4)
        decoded: Array = dequantize(blocks, GGMLQuantizationType.MXFP4)
    rows = blocks.shape[0]
    split = blocks.reshape(rows, -1, BLOCK_BYTES)
    return {
        "blocks": blocks,
        "scales": np.ascontiguousarray(split[..., 0]),
        "codes": np.ascontiguousarray(split[..., 1:]).reshape(rows, -1),
        "dequant": decoded,
    }


PEER = Peer("gguf", "gguf", OFFERS, run)
