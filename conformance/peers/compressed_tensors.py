"""compressed-tensors: compute scales from minima and maxima, compress, decompress.

The observers are in llm-compressor. They give one minimum and one maximum per group, in the weight's dtype or in
float32. The driver computes both with torch; compressed-tensors does the rest.
"""

from __future__ import annotations

import numpy as np

from conformance.peers.spec import LOW_FIRST, Arrays, Config, Offer, Peer, quiet
from conformance.peers.tensors import to_numpy, to_torch


def _offer(format: str, minmax: str) -> Offer:
    nvfp4 = format == "nvfp4"
    return Offer(
        format,
        {"minmax": minmax, "mode": format},
        {
            "nibbles": LOW_FIRST,
            "scales": "E4M3 linear" if nvfp4 else "E8M0 linear",
            "tensor_scale": "encode factor (reciprocal of the decode multiplier)" if nvfp4 else "none",
        },
        multiple=16 if nvfp4 else 32,
    )


OFFERS = tuple(_offer(format, minmax) for format in ("nvfp4", "mxfp4") for minmax in ("input dtype", "fp32"))


def run(operands: Arrays, format: str, config: Config) -> Arrays:
    """Compress and decompress one weight matrix."""
    with quiet():
        from compressed_tensors.compressors.mxfp4 import MXFP4PackedCompressor
        from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
        from compressed_tensors.quantization import preset_name_to_scheme
        from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    nvfp4 = format == "nvfp4"
    scheme = preset_name_to_scheme("NVFP4A16" if nvfp4 else "MXFP4A16", targets=["Linear"])
    compressor = NVFP4PackedCompressor if nvfp4 else MXFP4PackedCompressor
    weight = to_torch(operands["input"])
    observed = weight.float() if config["minmax"] == "fp32" else weight
    groups = observed.reshape(*observed.shape[:-1], -1, scheme.weights.group_size)
    state = {"weight": weight}
    if nvfp4:
        state["weight_global_scale"] = generate_gparam(*observed.aminmax())
    state["weight_scale"], _ = calculate_qparams(
        groups.amin(dim=-1), groups.amax(dim=-1), scheme.weights, state.get("weight_global_scale")
    )
    scale = state["weight_scale"]
    compressed = compressor.compress(state, scheme)
    results = {
        "codes": to_numpy(compressed["weight_packed"]),
        "scales": to_numpy(compressed["weight_scale"]),
        "scale_float": to_numpy(scale.float()),
        "dequant": to_numpy(compressor.decompress(compressed, scheme)["weight"]),
    }
    if nvfp4:
        results["tensor_scale"] = to_numpy(compressed["weight_global_scale"])
    return results


def unstable(operands: Arrays, format: str, config: Config) -> tuple[str, ...]:
    """Results that depend on the bits of a NaN.

    The code of a NaN depends on its sign, which differs by dtype. A NaN in the statistics of an MX block has different
    bits in torch's vector loops and in its scalar loops, and the exponent is taken from those bits.
    """
    x = operands["input"].astype(np.float32)
    if np.isfinite(x).all():
        return ()
    if format == "nvfp4":
        return ("codes",)
    return ("codes", "dequant", "scale_float", "scales") if np.isnan(x).any() else ("codes", "dequant")


PEER = Peer("compressed_tensors", "compressed-tensors", OFFERS, run, unstable)
