"""Every choice of every contract that is no formula: which function fills a slot, and each number and flag beside it.

rules.txt is the table: `python -m tests.contracts.test_rules` prints it anew. A changed line changes bytes.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from halfbyte.contracts import CONTRACTS
from halfbyte.contracts.spec import (
    CastRule,
    Contract,
    DecodeRule,
    FourSixRule,
    MXRule,
    NVFP4Rule,
    Rounding,
    ScaleByte,
    TensorScale,
    Transform,
)

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "transformer_engine": [{"nvfp4_use_4over6": True, "tile": (16, 16)}, {"columnwise": True, "with_rht": True}],
    "miles": [{"env": {"NVTE_NVFP4_4OVER6": "all"}}],
    "modelopt": [{"mode": "max"}, {"mode": "quantize_mxfp4_to_nvfp4_lossless", "k_max": 3}],
    "compressed_tensors": [{"minmax": "fp32"}],
    "torchao": [{"two_level": False}, {"scaling_mode": "rceil"}],
    "fouroversix": [{"rule": "static_4"}, {"rule": "mse", "block_2d": True, "rht": True, "transpose": True}],
    "qwantize": [{"mode": "nvfp4/optimal"}],
    "flashinfer": [{"mode": "te", "per_token": True}, {"mode": "4over6", "fast": True}, {"ue8m0": True}],
    "vllm": [{"global_scale": 2.0}],
}


def shown(value: Any) -> str:
    """A value in one word, or a rule in brackets with what differs from its defaults."""
    if isinstance(value, functools.partial):
        return f"{value.func.__name__}+{','.join(map(str, value.keywords.values()))}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__module__.startswith("halfbyte.methods"):
            return repr(value)
        return f"[{differing(value)}]"
    if callable(value):
        return str(value.__name__)
    if isinstance(value, tuple):
        return f"({','.join(map(shown, value))})"
    return str(value)


def differing(rule: Any) -> str:
    found = []
    for slot in dataclasses.fields(rule):
        value = getattr(rule, slot.name)
        if slot.default is dataclasses.MISSING or value != slot.default:
            found.append(f"{slot.name}={shown(value)}")
    return " ".join(found)


def table(contract: Contract) -> list[str]:
    bare = dataclasses.replace(contract, name="", source="", rules={}, options=())
    lines = [f"{contract!r}: {differing(bare).removeprefix('name= source= rules={}').strip()}".rstrip()]
    return lines + [f"  {format}: {differing(rule)}" for format, rule in contract.rules.items()]


def whole_table() -> str:
    lines: list[str] = []
    for name, make in CONTRACTS.items():
        for options in ({}, *VARIANTS.get(name, ())):
            lines += table(make(**options))
    return "\n".join(lines) + "\n"


def test_the_table() -> None:
    assert whole_table() == (Path(__file__).parent / "rules.txt").read_text()


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (Rounding, "tie=even sign=y < 0 nan_code=0 zero_input=False wraps=False"),
        (ScaleByte, "smallest=0.0 for_zero=None for_zero_byte=None"),
        (FourSixRule, "errors=('mae', 'mse') exact_row_error=None"),
        (
            NVFP4Rule,
            "element_max=6 e4m3_max=448 statistics=fp32 tiles=((1, 16),) row_scaling=False four_six=None "
            "block_search=None searches=() search_rule=None scale_search=None negative_zero=True constant_factor=None",
        ),
        (
            MXRule,
            "statistics=fp32 rounds_quotient=False nearest=None negative_zero=True blocks=None scale_search=None",
        ),
        (DecodeRule, "negative_zero=True"),
        (CastRule, "factor=None block_amax=None k_max=None"),
        (Transform, "columnwise=False hadamard=False random_signs=True"),
        (
            Contract,
            "ragged=refuse transform=Transform(columnwise=False, hadamard=False, random_signs=True) method=Amax() "
            "tile=None scaling=tensor cast=None options=()",
        ),
        (TensorScale, ""),
    ],
)
def test_what_a_rule_says_where_it_says_nothing(kind: Any, defaults: str) -> None:
    given = [slot for slot in dataclasses.fields(kind) if slot.default is not dataclasses.MISSING]
    assert " ".join(f"{slot.name}={slot.default}" for slot in given) == defaults


if __name__ == "__main__":
    print(whole_table(), end="")
