"""Invented formats, contracts and methods under Triton's interpreter, against the reference.

`TRITON_INTERPRET=1 python -m tests.backends.gpu.interpreted_inventions [first seed] [last seed] [searches]`

The GPU backend gives the reference's bytes, or it refuses with a HalfbyteError; and where it refuses, "auto" gives the
reference's bytes. A process of its own, like interpreted.py. The interpreter takes seconds for an exact search, so
that only so many of those are tried; all other cases are cheap.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

import halfbyte as hb
from halfbyte import contracts
from halfbyte.arrays import like, to_numpy
from halfbyte.backends import Request
from halfbyte.backends.gpu.choose import ChosenKernel, choose
from halfbyte.contracts import Contract, NVFP4Rule, exponents, expressions, reductions
from halfbyte.contracts.spec import Rounding, ScaleByte
from halfbyte.methods import Method
from halfbyte.testing import find_difference
from tests.backends.cases import Matrix, make_input
from tests.backends.gpu.strict_interpreter import set_up
from tests.invented import Invented, draw

HERE = torch.empty(0)
PARTS = ("scales", "codes", "global_scale", "stored_scale")
SAMPLE, SEARCHES = 80, 1
"""Seeds, and exact searches among them, that the suite tries."""

DTYPES = ("float32", "bfloat16", "float16")


def problem(case: Invented) -> tuple[str, str | None]:
    """What became of a case (equal, refused, …), and what is wrong about it; None if nothing is."""
    try:
        expected = case.quantize("reference")
    except hb.HalfbyteError:
        return "refused by the reference", _must_refuse(case)
    try:
        got = case.quantize("gpu", like(case.x, HERE))
    except hb.HalfbyteError as error:
        outcome, got = f"refused: {type(case.method).__name__}", expected
        if "cannot do this" not in str(error):
            return outcome, f"{error} is no reason of the backend"
    else:
        outcome = f"equal: {type(case.method).__name__}"
        for part in PARTS:
            mine, wanted = getattr(got, part), getattr(expected, part)
            if (mine is None) != (wanted is None):
                return outcome, f"{part} is there on one side only"
            if wanted is not None and (difference := find_difference(mine, wanted, any_nan=True)) is not None:
                return outcome, f"{part}: {difference.reason}"
    decoded, wrong = _decoding(case, expected)
    return f"{outcome}, decoding {decoded}", wrong


def _must_refuse(case: Invented) -> str | None:
    try:
        case.quantize("gpu", like(case.x, HERE))
    except hb.HalfbyteError:
        return None
    return "the reference refuses this, the backend does not"


def _decoding(case: Invented, q: hb.QuantizedTensor) -> tuple[str, str | None]:
    """The same for dequantize, to one of the dtypes."""
    dtype = DTYPES[case.seed % 3]
    expected = hb.dequantize(q, dtype, backend="reference")
    stored = None if q.stored_scale is None else like(to_numpy(q.stored_scale), HERE)
    there = hb.QuantizedTensor(
        q.format,
        q.shape,
        like(to_numpy(q.codes), HERE),
        like(to_numpy(q.scales), HERE),
        None,
        stored,
        q.contract,
        q.method,
    )
    try:
        got = hb.dequantize(there, dtype, backend="gpu")
    except hb.HalfbyteError:
        return "refused", None
    difference = find_difference(got, expected, any_nan=True)
    return "equal", None if difference is None else f"decoded to {dtype}: {difference.reason}"


def once_wrong() -> Iterator[Invented]:
    """Contracts of known formulas for which kernels once gave other bytes than the reference."""
    te, ct, gguf = contracts.transformer_engine(), contracts.compressed_tensors(), contracts.gguf()
    given = contracts.flashinfer(global_scale=448.0)
    nvfp4 = te.rules["nvfp4"]
    assert isinstance(nvfp4, NVFP4Rule)
    assert nvfp4.four_six is not None
    lanes = dataclasses.replace(nvfp4.four_six, block_sum=reductions.eight_lanes, errors=("mae", "mse", "abs_max"))
    folded = dataclasses.replace(nvfp4.four_six, pre_scale=expressions.folded_sixth)
    yield _case("outlier", ct, scale_byte=ScaleByte(for_zero_byte=1))
    yield _case("ties", te, pre_scale=expressions.divided_then_factor)
    yield _case("many", te, hb.FourSix("mse", 256), four_six=lanes)
    yield _case("many", te, hb.FourSix("abs_max", 256), four_six=lanes)
    yield _case("ties", te, hb.FourSix("mae", 448), four_six=folded)
    yield _case("many", given, stored=expressions.store_amax, multiplier=expressions.amax_over_top)
    yield _case("many", given, pre_scale=expressions.divided_then_factor_or_zero)
    yield _case("signs", contracts.fouroversix(), format="mxfp4", rounding=Rounding(sign="sign bit"))
    yield _case("ties", gguf, format="mxfp4", nearest=None, rounding=Rounding(wraps=True))
    yield _case("signs", contracts.ocp(), format="mxfp8", rounding=Rounding())
    yield _case("many", contracts.flashinfer(global_scale=3.0), format="mxfp4", element=exponents.over)


def _operand(name: str) -> Matrix:
    if name == "many":
        return np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32)
    if name == "signs":  # zeros of both signs, alone in their blocks and beside numbers
        rows = np.array([[0.0], [-0.0], [1.0]], np.float32)
        return rows * np.array([1, -1] * 32, np.float32)
    return np.array(make_input(name, "fp32"))


def _case(x: str, contract: Contract, method: Method | None = None, format: str = "nvfp4", **slots: object) -> Invented:
    """A contract with other slots, on an operand that shows the difference."""
    rule = dataclasses.replace(contract.rules[format], **slots)  # type: ignore[arg-type]
    kind = hb.get_format(format)
    changed = dataclasses.replace(contract, rules={format: rule})
    return Invented(-1, kind, changed, method or hb.Amax(), (1, kind.block), "tensor", "fp32", _operand(x))


def compare(first: int, last: int, searches: int) -> int:
    """Compare the cases of these seeds, with at most so many exact searches among them; how many were wrong."""
    outcomes: Counter[str] = Counter()
    failures = 0
    for case in itertools.chain(once_wrong(), map(draw, range(first, last))):
        if type(case.method) in (hb.Optimal, hb.Hessian) and isinstance(choose(request_of(case)), ChosenKernel):
            searches -= 1
            if searches < 0:
                continue
        try:
            outcome, wrong = problem(case)
        except Exception:
            outcome, wrong = "another exception", traceback.format_exc(limit=-3)
        outcomes[outcome] += 1
        if wrong is not None:
            failures += 1
            print(f"{case}\n  {outcome}: {wrong}\n", file=sys.stderr, flush=True)
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    print(sum(outcomes.values()), "cases,", failures, "wrong")
    return failures


def request_of(case: Invented) -> Request:
    """What the backend is asked for a case."""
    return Request(case.format, case.contract, case.method, case.tile, case.scaling, case.dtype, device="cpu")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    set_up()
    first, last, searches = [int(argument) for argument in sys.argv[1:4]] or (0, SAMPLE, SEARCHES)
    sys.exit(1 if compare(first, last, searches) else 0)
