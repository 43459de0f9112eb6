"""The GPU backend: Triton and CUDA C++ kernels, and what launches them. The rest of halfbyte uses these names alone."""

from halfbyte.backends.gpu.backend import Gpu, float32_bits, interpreting, quantize_matrix
from halfbyte.backends.gpu.batch import cast_scales, check_list, group_amaxes, list_amaxes, quantize_list
from halfbyte.backends.gpu.calls import Bound, DecodingCalls, QuantizingCalls
from halfbyte.backends.gpu.operand import OLDEST, capability_of

__all__ = [
    "OLDEST",
    "Bound",
    "DecodingCalls",
    "Gpu",
    "QuantizingCalls",
    "capability_of",
    "cast_scales",
    "check_list",
    "float32_bits",
    "group_amaxes",
    "interpreting",
    "list_amaxes",
    "quantize_list",
    "quantize_matrix",
]
