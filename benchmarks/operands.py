"""Whole calls on operands that are not like others, beside the same call on normal data: no operand may be a trap.

    python -m benchmarks.operands [--rows 256] [--columns 1024] [--rounds 5]

Everything runs on one thread. Each line is a call; behind each kind of operand stands how many times as long it takes
as on normal data. The bits are compared with the reference, on four rows of each operand.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

import halfbyte as hb
from benchmarks.machine import describe_machine, describe_versions
from halfbyte.contracts.spec import Scaling
from halfbyte.testing import assert_same_bits

Operand = np.ndarray[Any, np.dtype[Any]]
KINDS = ("a row of zeros", "a tiny row", "zeros", "an outlier of 1000", "1e-25", "1e25", "NaN")
CHECKED = 4
"""Rows that the reference computes too, from the first on: what is unusual is in them."""

Call = tuple[str, str | None, str, Scaling]
CALLS: tuple[Call, ...] = (
    *(("nvfp4", "transformer_engine", method, scaling)
      for scaling in ("tensor", "row") for method in ("amax", "four_six", "optimal")),
    *(("nvfp4", "modelopt", method, "tensor") for method in ("amax", "four_six", "sweep", "optimal")),
    *((format, None, method, "tensor") for format in ("mxfp4", "mxfp8") for method in ("amax", "optimal")),
)  # fmt: skip


def operand(kind: str, normal: np.ndarray[Any, np.dtype[np.float32]]) -> Operand:
    x = normal.copy()
    match kind:
        case "a row of zeros":
            x[1] = 0
        case "a tiny row":
            x[1] *= 1e-30
        case "zeros":
            x[:] = 0
        case "an outlier of 1000":
            x[1, 3] = 1000
        case "1e-25" | "1e25":
            x *= np.float32(kind)
        case "NaN":
            x[1, 3] = np.nan
    return x.astype(ml_dtypes.bfloat16)


def seconds(x: Operand, call: Call, rounds: int) -> float:
    """Least processor time of the thread."""
    format, contract, method, scaling = call
    found = []
    for _ in range(rounds):
        begun = time.thread_time()
        hb.quantize(x, format, contract, method, scaling=scaling, threads=1)
        found.append(time.thread_time() - begun)
        if found[-1] > 1:
            break
    return min(found)


def check(x: Operand, call: Call) -> None:
    """The bits of the first rows, as a tensor of their own, against the reference."""
    format, contract, method, scaling = call
    found, expected = (
        hb.quantize(x[:CHECKED], format, contract, method, scaling=scaling, backend=backend, threads=1)
        for backend in ("cpu", "reference")
    )
    for part in ("codes", "scales", "global_scale"):
        if getattr(expected, part) is not None:
            assert_same_bits(getattr(found, part), getattr(expected, part))


def lines(rows: int, columns: int, rounds: int) -> Iterator[str]:
    normal = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    for call in CALLS:
        with np.errstate(all="ignore"):
            usual = seconds(operand("normal", normal), call, rounds)
            found = []
            for kind in KINDS:
                x = operand(kind, normal)
                check(x, call)
                found.append(f"{kind} {seconds(x, call, rounds) / usual:.2f}")
        name = ", ".join(part for part in (call[0], call[1], call[2], f"scaling {call[3]}") if part)
        yield f"{name}: {1e6 * usual:.0f} us; x {'; '.join(found)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="whole calls on unusual operands, beside normal ones")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--columns", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    print({**describe_machine(), **describe_versions(peers=False)})
    for line in lines(given.rows, given.columns, given.rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()
