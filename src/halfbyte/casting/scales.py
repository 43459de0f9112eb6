"""The global scale of a result: how a contract stores it, and what E2M1 codes and E4M3 bytes then decode to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from halfbyte.arrays import to_numpy
from halfbyte.codec.bits import F32, power_of_two
from halfbyte.contracts import Contract, NVFP4Rule, expressions, get_contract
from halfbyte.errors import UnsupportedError
from halfbyte.formats import E2M1, E4M3, get_format
from halfbyte.methods import Amax
from halfbyte.types import QuantizedTensor

F64 = npt.NDArray[np.float64]
NVFP4 = get_format("nvfp4")

DECODES = {
    ("amax", expressions.amax_over_top, expressions.decode_by_amax),
    ("multiplier", expressions.as_stored, expressions.decode_by_multiplier),
    ("encode factor", expressions.reciprocal_of_stored, expressions.decode_by_divisor),
    ("encode factor", expressions.reciprocal_of_stored, expressions.decode_by_reciprocal),
}
"""What is stored, the multiplier from it, and the decoding: the ways in which kept codes are known to keep values."""


@dataclass(frozen=True)
class GlobalScale:
    """A global scale under one contract."""

    multiplier: np.float32
    """What code times block scale is multiplied by."""
    stored: np.float32
    """What the contract stores for it."""
    contract: Contract

    @property
    def exponent(self) -> int | None:
        """m if the multiplier is 2**m."""
        mantissa, exponent = np.frexp(np.float64(self.multiplier))
        return int(exponent) - 1 if mantissa == 0.5 else None

    def decoded(self) -> F64:
        """(126, 8): the float32 that each magnitude decodes to under each positive E4M3 byte, from byte 1 on."""
        rule = nvfp4_rule(self.contract)
        q, s = E2M1.magnitudes[None, :], E4M3.magnitudes[1:, None]
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            return rule.decode(q, s, np.asarray(self.stored), rule.anchor(Amax())).astype(np.float64)


def nvfp4_rule(contract: Contract) -> NVFP4Rule:
    """The NVFP4 rule of a contract that has a global scale; anything else cannot hold the result of a cast."""
    rule = contract.rule(NVFP4)
    if not isinstance(rule, NVFP4Rule) or rule.stored is None or rule.constant_factor is not None:
        raise UnsupportedError(
            f"contract {contract} stores no NVFP4 global scale, so it cannot hold a cast tensor; use one that does, "
            "such as modelopt, torchao, compressed_tensors or transformer_engine"
        )
    if (rule.stored_as, rule.multiplier, rule.decode) not in DECODES:
        raise UnsupportedError(
            f"contract {contract} decodes NVFP4 by a formula of its own, so a cast cannot know which values it keeps; "
            "use a contract of halfbyte, or cast to bfloat16 and quantize the result"
        )
    return rule


def result_contract(contract: str | Contract | None, source: QuantizedTensor) -> Contract:
    """The given contract, or one that decodes as q·(S·g) and gives zeros the sign that the source gives them."""
    if contract is None:
        keeps_sign = source.contract.rule(source.format).negative_zero
        contract = "torchao" if keeps_sign else "modelopt"
    chosen = get_contract(contract, NVFP4)
    nvfp4_rule(chosen)
    return chosen


def hold(multiplier: float | np.float32, contract: Contract) -> GlobalScale:
    """The nearest global scale that a contract can store; refused where there is none."""
    rule = nvfp4_rule(contract)
    top = rule.anchor(Amax())
    wanted = np.float32(multiplier)
    with np.errstate(all="ignore"):
        match rule.stored_as:
            case "amax":
                stored = wanted * top
            case "encode factor":
                stored = np.float32(1) / wanted
            case _:
                stored = wanted
        found = np.float32(rule.multiplier(np.asarray(stored, np.float32), top))
    if not (np.isfinite(stored) and stored > 0 and np.isfinite(found) and found > 0):
        raise UnsupportedError(
            f"contract {contract.name} stores the {rule.stored_as}, which float32 cannot hold for a global scale of "
            f"{float(wanted):g}; choose a contract that stores the multiplier (modelopt, torchao)"
        )
    return GlobalScale(found, np.float32(stored), contract)


def scale_of(quantized: QuantizedTensor, contract: Contract) -> GlobalScale:
    """The global scale that a quantizer chose, under another contract: its own word where that means the same."""
    nvfp4_rule(quantized.contract)
    words = quantized.global_scale, quantized.stored_scale
    if words[0] is None or words[1] is None or to_numpy(words[0]).size != 1:
        raise UnsupportedError(f"contract {quantized.contract} gives every row a global scale; a cast tensor has one")
    multiplier, stored = (np.float32(to_numpy(word).reshape(-1)[0]) for word in words if word is not None)
    rule = nvfp4_rule(contract)
    meant = np.float32(rule.multiplier(np.asarray(stored), rule.anchor(Amax())))
    if meant == multiplier:
        return GlobalScale(multiplier, stored, contract)
    return hold(multiplier, contract)


def power(m: int, contract: Contract) -> GlobalScale:
    """The global scale 2**m."""
    value: F32 = power_of_two(np.array(m, np.int32))
    return hold(np.float32(value), contract)
