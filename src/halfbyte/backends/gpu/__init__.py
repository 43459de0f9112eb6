"""The GPU backend: Triton and CUDA C++ kernels, and what launches them. The rest of halfbyte uses these names alone."""

from halfbyte.backends.gpu.backend import Gpu, float32_bits, interpreting, quantize_matrix, survey_matrix, total_of
from halfbyte.backends.gpu.batch import (
    Listed,
    ListQuantizer,
    cast_scales,
    check_list,
    group_amaxes,
    list_amaxes,
    quantize_list,
)
from halfbyte.backends.gpu.calls import Bound, BoundSurvey, DecodingCalls, QuantizingCalls
from halfbyte.backends.gpu.constants import WORDS
from halfbyte.backends.gpu.driver.disk import folder as cache_folder
from halfbyte.backends.gpu.feedback import Held, hold
from halfbyte.backends.gpu.feedback import solve as solve_feedback
from halfbyte.backends.gpu.feedback import unserved as unserved_feedback
from halfbyte.backends.gpu.operand import OLDEST, capability_of
from halfbyte.backends.gpu.raised import raised_amax as raised_on_device
from halfbyte.backends.gpu.sums import squared_differences
from halfbyte.backends.gpu.warm import build as build_kernels
from halfbyte.backends.gpu.warm import usual_calls, visible_architectures

__all__ = [
    "OLDEST",
    "WORDS",
    "Bound",
    "BoundSurvey",
    "DecodingCalls",
    "Gpu",
    "Held",
    "ListQuantizer",
    "Listed",
    "QuantizingCalls",
    "build_kernels",
    "cache_folder",
    "capability_of",
    "cast_scales",
    "check_list",
    "float32_bits",
    "group_amaxes",
    "hold",
    "interpreting",
    "list_amaxes",
    "quantize_list",
    "quantize_matrix",
    "raised_on_device",
    "solve_feedback",
    "squared_differences",
    "survey_matrix",
    "total_of",
    "unserved_feedback",
    "usual_calls",
    "visible_architectures",
]
