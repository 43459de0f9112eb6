"""The GPU backend answers for a closed world: invented formats, contracts and methods get equal bytes or a reason."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import halfbyte as hb
from halfbyte import contracts
from halfbyte.backends import Request
from halfbyte.backends.gpu.choose import ChosenKernel, Decoder, KernelKind, choose, choose_decoder
from halfbyte.backends.protocol import Reason
from halfbyte.contracts import Contract, MXRule, NVFP4Rule, exponents, expressions, reductions
from halfbyte.contracts.spec import Rounding, ScaleByte
from halfbyte.formats import E4M3, E8M0, BlockFormat, ElementFormat
from halfbyte.methods import Method
from tests import invented_slots as slots
from tests.backends.gpu.interpreted_inventions import SAMPLE

ROOT = Path(__file__).parents[3]


def test_inventions_under_the_interpreter() -> None:
    """A sample of tests/invented.py in a process of its own (interpreted_inventions.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.backends.gpu.interpreted_inventions"],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-1000:]
    assert done.stdout.split()[-2:] == ["0", "wrong"]
    equal = sum(int(line.split()[0]) for line in done.stdout.splitlines() if " equal: " in line)
    assert equal > SAMPLE // 5, "most cases were refused: the sample proves little"


# --- what has a reason, one part at a time ---

TE, OCP, CT = contracts.transformer_engine(), contracts.ocp(), contracts.compressed_tensors()
NVFP4, MXFP4 = hb.get_format("nvfp4"), hb.get_format("mxfp4")
E3M2 = ElementFormat(name="e3m2", exponent_bits=3, mantissa_bits=2, bias=3)
OTHER_E2M1 = ElementFormat(name="e2m1", exponent_bits=2, mantissa_bits=1, bias=2)


def asked(contract: Contract = TE, format: BlockFormat = NVFP4, method: Method | None = None) -> Request:
    return Request(format, contract, method or hb.Amax(), (1, format.block), "tensor", "bf16", device="cuda")


def changed(contract: Contract, format: str = "nvfp4", **slots: object) -> Contract:
    """The contract with other slots."""
    rules = {**contract.rules, format: dataclasses.replace(contract.rules[format], **slots)}  # type: ignore[arg-type]
    return dataclasses.replace(contract, rules=rules)


def four_six(**slots: object) -> Contract:
    rule = TE.rules["nvfp4"]
    assert isinstance(rule, NVFP4Rule)
    assert rule.four_six is not None
    return changed(TE, four_six=dataclasses.replace(rule.four_six, **slots))  # type: ignore[arg-type]


PLAIN = {
    "blocks of 8": (asked(format=dataclasses.replace(NVFP4, block=8)), "blocks of 8; for nvfp4 they take 16 or 32"),
    "blocks of 64": (asked(OCP, dataclasses.replace(MXFP4, block=64)), "blocks of 64; for mxfp4 they take 16 or 32"),
    "six bits": (asked(OCP, dataclasses.replace(MXFP4, element=E3M2)), r"e3m2 elements \(6 bits, largest 28\)"),
    "another e2m1": (asked(format=dataclasses.replace(NVFP4, element=OTHER_E2M1)), "e2m1 elements .* largest 3"),
    "another scale": (asked(format=dataclasses.replace(NVFP4, scale=E8M0)), "e8m0 scales"),
    "E4M3 in NVFP4": (asked(format=dataclasses.replace(NVFP4, element=E4M3)), "e4m3 elements"),
    "dtype": (dataclasses.replace(asked(), dtype="fp64"), "reads dtype fp64"),
    "tile": (dataclasses.replace(asked(), tile=(8, 16)), "tiles of 8x16"),
    "tile and rows": (dataclasses.replace(asked(), tile=(16, 16), scaling="row"), "tiles of 16x16 span rows"),
    "factor": (asked(changed(TE, factor=slots.halved_ratio)), r"tensor-level factor: \(c/A\)/2"),
    "dividing": (asked(changed(TE, element=slots.over_scale_then_factor)), r"element formula: \(x/S\)/s2"),
    "multiplying": (asked(changed(TE, element=slots.times_factor_over_scale)), "element formula"),
    "pre_scale": (asked(changed(TE, pre_scale=slots.factor_first)), "block scale"),
    "stored": (asked(changed(TE, stored=slots.store_doubled)), "stored scale"),
    "multiplier": (asked(changed(TE, multiplier=slots.half_of_stored)), "multiplier"),
    "ties up": (asked(changed(TE, rounding=Rounding(tie="up"))), "rounding"),
    "code for NaN": (asked(changed(TE, rounding=Rounding(nan_code=9))), "code for NaN"),
    "byte for zero": (asked(changed(TE, scale_byte=ScaleByte(for_zero_byte=200))), "byte for zero"),
    "smallest scale": (asked(changed(TE, scale_byte=ScaleByte(smallest=1000.0))), "scale byte policy"),
    "element_max": (asked(changed(TE, element_max=0)), "element_max"),
    "constant factor": (asked(changed(TE, constant_factor=np.float32(-1))), "given tensor-level factor"),
    "4over6 error": (asked(four_six(exact_error=slots.error_of_decoded), method=hb.FourSix()), "4over6 error"),
    "4over6 sum": (asked(four_six(block_sum=slots.from_the_end), method=hb.FourSix()), "sum of 4over6 over a block"),
    "subclass": (asked(method=slots.PlainSubclass()), "method optimal of class PlainSubclass"),
    "new method": (asked(method=slots.Percentile()), "method percentile"),
    "sweep": (asked(method=hb.Sweep()), "method sweep has no GPU kernel here"),
    "4over6 in MX": (asked(OCP, MXFP4, hb.FourSix()), "method four_six has no GPU kernel here"),
    "exponent rule": (asked(changed(OCP, "mxfp4", scale=slots.fickle_exponent), MXFP4), "exponent rule"),
    "other partial": (
        asked(changed(OCP, "mxfp4", scale=functools.partial(slots.ceil_of_third)), MXFP4),
        "exponent rule",
    ),
    "MX dividing": (asked(changed(OCP, "mxfp4", element=slots.over_three_quarters), MXFP4), "element formula"),
    "nearest": (asked(changed(contracts.gguf(), "mxfp4", nearest=slots.always_three), MXFP4), "nearest code"),
    "nearest under another exponent rule": (
        asked(changed(contracts.gguf(), "mxfp4", scale=exponents.even_field), MXFP4),
        "gguf's own exponent rule",
    ),
    "wrapping MX": (asked(changed(OCP, "mxfp4", rounding=Rounding(wraps=True)), MXFP4), "without saturation"),
    "signs of MXFP8": (
        asked(changed(OCP, "mxfp8", rounding=Rounding()), hb.get_format("mxfp8")),
        "keep every sign bit",
    ),
    "no power of two": (
        asked(changed(contracts.flashinfer(), "mxfp4", element=exponents.over), MXFP4),
        "no power of two",
    ),
    "decoding only": (asked(contracts.transformers(), MXFP4), "decodes mxfp4 only"),
    "no rule": (asked(OCP), "has no rule for nvfp4"),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_no_kernel_was_written_for_has_a_reason(name: str) -> None:
    request, message = PLAIN[name]
    found = choose(request)
    assert isinstance(found, Reason)
    assert re.search(message, found), found


def test_decoding_has_reasons_too() -> None:
    decoded = functools.partial(changed, TE)
    assert isinstance(choose_decoder(asked()), Decoder)
    for contract, format in (
        (decoded(decode=slots.decode_from_the_left), NVFP4),
        (decoded(stored=None), NVFP4),
        (decoded(element_max=0), NVFP4),
        (changed(OCP, "mxfp4", decode=slots.decode_squared), MXFP4),
        (OCP, dataclasses.replace(MXFP4, element=E3M2)),
        (OCP, dataclasses.replace(MXFP4, block=8)),
    ):
        assert isinstance(choose_decoder(asked(contract, format)), Reason)


# --- what has a kernel, and which ---


def family(contract: Contract = TE, format: BlockFormat = NVFP4, method: Method | None = None) -> ChosenKernel:
    found = choose(asked(contract, format, method))
    assert isinstance(found, ChosenKernel), found
    return found


def test_a_format_by_another_name_has_a_kernel() -> None:
    """Names prove nothing: neither for a format nor against it."""
    mine = dataclasses.replace(NVFP4, name="mine")
    assert family(dataclasses.replace(TE, rules={"mine": TE.rules["nvfp4"]}), mine).family is KernelKind.PLAIN
    powers = contracts.qwantize(mode="mxfp4/optimal").rules["mxfp4"]
    assert isinstance(powers, MXRule)
    odd = dataclasses.replace(MXFP4, name="nvfp4")
    assert family(dataclasses.replace(TE, rules={"nvfp4": powers}), odd, hb.Optimal()).family is KernelKind.MX_QWANTIZE


def test_short_formulas_serve_only_their_own_rule() -> None:
    """Each of these once took a short way that is not its own."""
    assert family().short
    assert not family(changed(TE, pre_scale=expressions.divided_then_factor)).short
    assert not family(changed(TE, element_max=5)).short
    mse = hb.FourSix("mse", 448)
    assert family(method=mse).short
    assert not family(four_six(pre_scale=expressions.folded_sixth), method=mse).short
    assert not family(four_six(block_sum=reductions.eight_lanes), method=mse).short
    assert family(method=hb.Optimal()).short
    assert not family(changed(TE, multiplier=expressions.as_stored), method=hb.Optimal()).short


def test_the_amax_is_read_wherever_a_formula_looks_at_it() -> None:
    given = contracts.flashinfer(global_scale=448.0)
    assert not family(given).reads_amax
    assert family(changed(given, stored=expressions.store_amax)).reads_amax
    assert family(changed(given, pre_scale=expressions.divided_then_factor_or_zero)).reads_amax


def test_answers_are_cached_without_the_arrays_of_a_method() -> None:
    first, second = (hb.Optimal(np.full(16, value, np.float32)) for value in (1, 2))
    assert choose(asked(method=first)) is choose(asked(method=second))
    assert choose(asked(method=first)) is not choose(asked(method=hb.Optimal()))
    unhashable = dataclasses.replace(TE, options=(("list", []),))
    assert isinstance(choose(asked(unhashable)), ChosenKernel)
    assert isinstance(choose_decoder(asked(unhashable)), Decoder)


def test_equal_contracts_with_other_rules_have_answers_of_their_own() -> None:
    """Contracts hash without their rules."""
    assert isinstance(choose(asked(changed(TE))), ChosenKernel)
    assert isinstance(choose(asked(changed(TE, element=slots.over_scale_nudged))), Reason)
