"""transformers' gpt-oss MXFP4 loader: decoding only.

Byte 255 is 2**128, not NaN, and code 8 is -0.0. transformers returns its result transposed: [experts, columns, rows].
"""

from __future__ import annotations

from halfbyte.contracts import exponents
from halfbyte.contracts.options import changed, check_name, choices, listing_options
from halfbyte.contracts.spec import Contract, DecodeRule

MODE = "convert_moe_packed_tensors"


@choices(mode=(MODE,), dtype=("bf16", "fp16", "fp32"))
@listing_options
def transformers(*, mode: str = MODE, dtype: str = "bf16") -> Contract:
    """transformers' MXFP4 decoder. `dtype` changes nothing here: pass the dtype to `dequantize`."""
    check_name("mode of transformers", mode, (MODE,))
    check_name("dtype of transformers", dtype, ("bf16", "fp16", "fp32"))
    return Contract(
        name="transformers",
        source="transformers 5.22.2",
        rules={"mxfp4": DecodeRule(decode=exponents.decode_power)},
        options=changed(transformers, {"mode": mode, "dtype": dtype}),
    )
