"""What the public study published (Model-Optimizer's pull request 1364, April 2026), and the rule that it ran under.

The Model-Optimizer of that day replaced a block scale that rounds to zero by 1, under which every small value of the
block becomes zero. Today's (0.47, our contract) raises such a scale to the smallest E4M3 number. Algorithms 1 and 3
quantize by that rule, so both are here under the rule of that day as well.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from halfbyte import QuantizedTensor, contracts, dequantize, quantize
from halfbyte.arrays import to_numpy
from halfbyte.casting.rows import read
from halfbyte.contracts import Contract, NVFP4Rule
from halfbyte.contracts.spec import ScaleByte

NUMBERED = {"requantize": 1, "verbatim": 2, "hybrid": 3}
"""The algorithms of the public study, with their numbers there."""

APRIL = {"requantize": "requantize-april", "hybrid": "hybrid-april"}
"""The columns of algorithms 1 and 3 under the rule of April 2026. Algorithm 2 keeps codes, so no rule is asked."""

SCENARIOS, EXACT, TIES = 27, 22, 22
"""How many scenarios there are; on how many of them algorithm 3 is exact; on how many no algorithm is alone ahead."""

WINS = {"requantize": 1, "verbatim": 0, "hybrid": 4}
"""On how many scenarios each algorithm alone has the least error."""


@dataclass(frozen=True)
class Published:
    """One published row: the spread of the exponents and the mean squared errors; None where none was published."""

    spread: int | None
    requantize: float
    verbatim: float | None
    hybrid: float

    def mse(self, algorithm: str) -> float | None:
        found: dict[str, float | None] = dataclasses.asdict(self)
        return found[algorithm]


PUBLISHED: dict[str, Published] = {
    "mixed-scales": Published(26, 1.45e3, 2.96e-4, 1.58e-5),
    "spread-17": Published(19, 1.91e1, 2.27e-7, 2.17e-7),
    "spread-18": Published(20, 1.87e1, 7.21e-7, 2.85e-7),
    "spread-50": Published(52, 7.54e10, 3.85e4, 9.45e2),
    "single-outlier": Published(None, 2.466046e-5, None, 2.471241e-5),
}
"""The rows on which algorithm 3 is not exact."""

ONE = 0x38
"""The E4M3 byte of 1."""


def rule_of_april() -> Contract:
    """Model-Optimizer's contract with the rule of April 2026: a block scale that rounds to zero becomes 1."""
    today = contracts.modelopt()
    rule = today.rules["nvfp4"]
    if not isinstance(rule, NVFP4Rule):
        raise TypeError(f"{today} has no NVFP4 quantizer")
    april = dataclasses.replace(rule, scale_byte=ScaleByte(for_zero_byte=ONE), search_rule=None)
    return dataclasses.replace(
        today, source="NVIDIA Model-Optimizer, April 2026", rules={**today.rules, "nvfp4": april}
    )


def hybrid_of_april(source: QuantizedTensor, kept: QuantizedTensor, m: int) -> QuantizedTensor:
    """Algorithm 3 with the blocks outside the window quantized by the rule of April 2026.

    kept: the result of today's algorithm 3, whose blocks inside the window are the same. m: its global scale is 2^m.
    """
    top = float(np.ldexp(6 * 448.0, m))
    again = quantize(dequantize(source, "bfloat16"), "nvfp4", rule_of_april(), global_amax=top, threads=1)
    outside = read(source, "tensor").outside(m)
    codes = to_numpy(kept.codes).reshape(len(outside), -1)
    scales = to_numpy(kept.scales).reshape(len(outside), -1)
    bytes_outside = np.repeat(outside, codes.shape[1] // outside.shape[1], axis=1)
    new_codes = np.where(bytes_outside, to_numpy(again.codes).reshape(codes.shape), codes)
    new_scales = np.where(outside, to_numpy(again.scales).reshape(scales.shape), scales)
    return dataclasses.replace(
        again, codes=new_codes.reshape(kept.codes.shape), scales=new_scales.reshape(kept.scales.shape)
    )
