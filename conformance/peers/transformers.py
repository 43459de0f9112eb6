"""transformers: the decoder of gpt-oss' MXFP4 expert weights."""

from __future__ import annotations

from conformance.peers.spec import LOW_FIRST, Arrays, Config, Offer, Peer, quiet
from conformance.peers.tensors import to_numpy, to_torch

OFFERS = tuple(
    Offer(
        "mxfp4",
        {"dtype": dtype, "mode": "convert_moe_packed_tensors"},
        {
            "layout": "codes [experts, rows, groups, 16]; result [experts, groups*32, rows] (transposed)",
            "nibbles": LOW_FIRST,
        },
        multiple=32,
        operands="codes",
    )
    for dtype in ("bf16", "fp16", "fp32")
)


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Decode codes [experts, rows, groups, 16] with scales [experts, rows, groups] to the config's dtype."""
    with quiet():
        import torch
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[config["dtype"]]
    decoded = convert_moe_packed_tensors(to_torch(operands["codes"]), to_torch(operands["scales"]), dtype=dtype)
    return {"dequant": to_numpy(decoded)}


PEER = Peer("transformers", "transformers", OFFERS, run)
