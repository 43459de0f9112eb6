"""Running vectors: every case once, every output tensor compared, nothing left out silently."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from halfbyte.conform.checkpoint_case import GIVEN
from halfbyte.conform.peer_outputs import DECODE_OPERANDS, emit
from halfbyte.conform.vectors import OPERANDS, Case, Vectors
from halfbyte.errors import BackendError, HalfbyteError
from halfbyte.formats import FORMATS
from halfbyte.testing import Difference, find_difference, hex_rows

Status = Literal["agree", "differ", "pending"]


@dataclass(frozen=True)
class Result:
    """The outcome of one case."""

    name: str
    peer: str
    status: Status
    detail: str = ""


@dataclass(frozen=True)
class ConformReport:
    """The outcome of a run."""

    backend: str
    results: tuple[Result, ...]

    def count(self, status: Status, peer: str | None = None) -> int:
        return sum(result.status == status and peer in (None, result.peer) for result in self.results)

    @property
    def peers(self) -> list[str]:
        return sorted({result.peer for result in self.results})

    @property
    def last_line(self) -> str:
        return f"{self.count('agree')} of {len(self.results)} cases agree bit for bit"

    def passed(self, allow_pending: bool) -> bool:
        """Every case agrees; with `allow_pending`, none differs. A run of no cases proves nothing and fails."""
        agreed = self.count("agree") + (self.count("pending") if allow_pending else 0)
        return bool(self.results) and agreed == len(self.results)

    def as_json(self) -> dict[str, Any]:
        statuses: tuple[Status, ...] = ("agree", "differ", "pending")
        return {
            "backend": self.backend,
            "cases": len(self.results),
            "peers": {peer: {status: self.count(status, peer) for status in statuses} for peer in self.peers},
            **{status: self.count(status) for status in statuses},
            "summary": self.last_line,
            "results": [vars(result) for result in self.results],
        }


def run_vectors(
    vectors: Vectors, backend: str = "auto", progress: Callable[[Result], None] = lambda result: None
) -> ConformReport:
    """Run every case; `progress` is called after each."""
    results = []
    for entry in vectors:
        try:
            result = run_case(vectors.case(entry), backend)
        except BackendError as error:  # nothing was computed, so nothing differs; and it does not agree either
            result = Result(entry["name"], entry["peer"], "pending", str(error))
        except (HalfbyteError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A case that cannot be computed is a case that does not agree: a config that no contract knows,
            # tensors whose shapes do not fit. It must not stop the cases after it.
            result = Result(entry["name"], entry["peer"], "differ", f"{type(error).__name__}: {error}")
        results.append(result)
        progress(result)
    return ConformReport(backend, tuple(results))


def run_case(case: Case, backend: str = "auto") -> Result:
    """Compute one case and compare every output tensor that the index does not mark unstable."""
    outputs = emit(case, backend)
    operands = OPERANDS if "input" in case.tensors else (*OPERANDS, *DECODE_OPERANDS.get(case.peer, ()))
    compared = [
        name
        for name in case.tensors
        if name not in operands and name not in case.unstable and not name.startswith(GIVEN)
    ]
    problems = []
    for name in compared:
        if name not in outputs:
            problems.append(f"{name}: not an output that halfbyte rebuilds for {case.peer}")
        elif (difference := _compare(case, name, outputs[name])) is not None:
            problems.append(f"{name}: {difference.reason}{_block(case, name, difference, outputs[name])}")
    if not compared and not case.unstable:
        problems.append("the case holds nothing to compare")
    return Result(case.name, case.peer, "differ" if problems else "agree", "\n".join(problems))


def _swizzled(case: Case) -> bool:
    return "blocked" in case.conventions.get("scales", "")


def _compare(case: Case, name: str, got: npt.NDArray[Any]) -> Difference | None:
    expected = case.tensors[name]
    if name.startswith("scales") and _swizzled(case):  # flat bytes, whatever shape they are stored in
        got, expected = got.reshape(-1), expected.reshape(-1)
    e4m3 = name.startswith("scales") and case.format.endswith("nvfp4") and expected.dtype == np.uint8
    return find_difference(got, expected, any_nan=True, e4m3=e4m3)


def _block(case: Case, name: str, difference: Difference, got: npt.NDArray[Any]) -> str:
    """The block of the first difference in hex: both results, and the inputs that led to it."""
    expected, index = case.tensors[name], difference.index
    x = _operand_of(case, name)
    if not index or x is None or expected.ndim < 2 or _swizzled(case):
        return ""
    block = FORMATS[case.format].block
    *rows, column = index
    width = max(1, block * expected.shape[-1] // x.shape[-1])  # elements of this tensor that belong to one block
    first = column // width
    here: tuple[Any, ...] = (*rows, slice(first * width, (first + 1) * width))
    row = int(np.ravel_multi_index(rows, expected.shape[:-1]))
    inputs = x[row % x.shape[0], first * block : (first + 1) * block]
    return (
        f"\n  block {first} of row {row}\n  got      {hex_rows(got[here])}\n  expected {hex_rows(expected[here])}"
        f"\n  inputs   {hex_rows(inputs)}"
    )


def _operand_of(case: Case, name: str) -> npt.NDArray[Any] | None:
    """The (rows, K) matrix that an output was made from: the input, or the columnwise operand."""
    if "input" not in case.tensors:
        return None
    x = case.tensors["input"]
    matrix = x.reshape(-1, x.shape[-1])
    if name.endswith("_t"):
        return case.tensors.get("rht_out", matrix.T)
    return case.tensors.get("rht_out", matrix) if case.peer == "fouroversix" else matrix
