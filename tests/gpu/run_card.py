"""The bit-identity matrix on a card: `python3 -m tests.gpu.run_card`, with torch, Triton, numpy and ml_dtypes alone.

Every case of tests/backends/cases.py that has a GPU kernel, against the numpy reference; then what only a card can show
(checks.py), and the golden vectors of the peers. Exit code 0 only if there is a card, at least 2000 comparisons were
made, and all bits are equal. Work is spread over processes: kernels have to be compiled, and the reference is slow.
"""

from __future__ import annotations

import argparse
import dataclasses
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass, field

import numpy as np

ENOUGH = 2000
SEED = 20


@dataclass
class Tally:
    """What a process found."""

    compared: int = 0
    left: int = 0
    """Pairs of case and dtype that there was no time for."""
    failures: list[str] = field(default_factory=list)


def pairs(full: bool) -> list[tuple[int, str]]:
    """(case, dtype) in an order that puts different kernels side by side."""
    from halfbyte.backends.triton_rules import reason_against
    from tests.backends.cases import DTYPES, EXACT, every_case

    listed = []
    for index, case in enumerate(every_case()):
        if reason_against(case.request()) is None:
            # Searches compile slowly: a case of them takes one dtype, the next case the next one.
            dtypes = [list(DTYPES)[index % 3]] if case.method in EXACT and not full else list(DTYPES)
            listed += [(index, dtype) for dtype in dtypes]
    np.random.default_rng(SEED).shuffle(listed)
    return [(int(index), str(dtype)) for index, dtype in listed]


def inputs_of(index: int, dtype: str, full: bool) -> list[str]:
    """All inputs for the plain method of the default contracts; every sixth elsewhere, so that cases share them."""
    from tests.backends.cases import DTYPES, INPUTS, every_case

    case = every_case()[index]
    if full or (case.method == "amax" and case.contract.name in ("transformer_engine", "ocp")):
        return list(INPUTS)
    return list(INPUTS)[(index + 2 * list(DTYPES).index(dtype)) % 6 :: 6]


def work(part: list[tuple[int, str]], only: str, full: bool, deadline: float) -> Tally:
    """Compare the pairs of one process."""
    from tests.backends.cases import every_case, fits, make_input
    from tests.gpu.cuda_checks import kernels

    tally = Tally()
    cases = every_case()
    for position, (index, dtype) in enumerate(part):
        if time.time() > deadline:
            tally.left = len(part) - position
            break
        case = cases[index]
        if only not in str(case):
            continue
        for name in inputs_of(index, dtype, full):
            x = make_input(name, dtype)
            if not fits(case, x):
                continue
            for tables in (False, True) if served_by_tables(case, dtype) else (False,):
                try:
                    with kernels(tables):
                        problem = compare(case, x)
                except Exception:
                    problem = traceback.format_exc(limit=-2)
                tally.compared += 1
                if problem:
                    tally.failures.append(f"{case} {dtype} {name}{', tables' if tables else ''}: {problem}")
                    if len(tally.failures) > 5:
                        return tally
    return tally


def served_by_tables(case: object, dtype: str) -> bool:
    """Whether a CUDA C++ kernel serves a case too, beside Triton's."""
    from halfbyte.backends.cuda_launch import kernel_for
    from halfbyte.contracts import NVFP4Rule
    from tests.backends.cases import Case

    if not isinstance(case, Case):
        raise TypeError("this takes a case")
    request = case.request(dtype)
    rule = request.contract.rules.get(request.format.name)
    return isinstance(rule, NVFP4Rule) and kernel_for(rule.for_method(request.method), request) is not None


def golden(first: int, step: int) -> dict[str, int]:
    """Every so manieth golden vector of the peers with this backend: reasons why a case does not agree, counted."""
    from pathlib import Path

    from halfbyte.conform import load_vectors
    from halfbyte.conform.run import run_case
    from halfbyte.errors import BackendError

    vectors = load_vectors(Path(__file__).parents[2] / "conformance" / "vectors.zip")
    found: dict[str, int] = {}
    for entry in list(vectors)[first::step]:
        try:
            result = run_case(vectors.case(entry), "triton")
            reason = "agree" if result.status == "agree" else f"DIFFERS {result.name}: {result.detail}"
        except BackendError as error:
            reason = str(error)
        found[reason] = found.get(reason, 0) + 1
    return found


def compare(case: object, x: object) -> str | None:
    """Quantize and decode on the card, and say what differs from the reference."""
    import torch

    import halfbyte as hb
    from halfbyte.arrays import like
    from halfbyte.testing import find_difference
    from tests.backends.cases import Case

    if not isinstance(case, Case) or not isinstance(x, np.ndarray):
        raise TypeError("compare takes a case and an array")
    source = np.ascontiguousarray(x.T) if case.contract.transform.columnwise else np.array(x)
    got = hb.quantize(
        like(source, torch.empty(0, device="cuda")), case.format, case.contract, case.request(width=x.shape[1]).method,
        block=case.block, tile=case.tile, scaling=case.scaling, backend="triton",
    )  # fmt: skip
    expected = case.quantize(x, "reference")
    for part in ("scales", "codes", "stored_scale", "global_scale"):
        mine, wanted = getattr(got, part), getattr(expected, part)
        if (mine is None) != (wanted is None):
            return f"{part} is there on one side only"
        if wanted is not None and (difference := find_difference(mine, wanted, any_nan=True)) is not None:
            return f"{part}: {difference.reason}"
    for dtype in ("float32", "bfloat16", "float16") if case.method == "amax" else ():
        decoded = hb.dequantize(got, dtype, backend="triton")
        difference = find_difference(decoded, hb.dequantize(expected, dtype, backend="reference"), any_nan=True)
        if difference is not None:
            return f"decoded to {dtype}: {difference.reason}"
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop the matrix after so long; it then fails")
    parser.add_argument("--processes", type=int, default=max(1, min(16, os.cpu_count() or 1)))
    parser.add_argument("--full", action="store_true", help="every input and dtype for every case; takes half an hour")
    parser.add_argument("--no-checks", action="store_true", help="the matrix alone")
    chosen = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: the GPU tests need one", file=sys.stderr)
        return 1
    started = time.time()
    listed = pairs(chosen.full)
    parts = [listed[start :: chosen.processes] for start in range(chosen.processes)]
    deadline = started + chosen.seconds
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        for tally in pool.starmap(work, [(part, chosen.only, chosen.full, deadline) for part in parts]):
            total = dataclasses.replace(
                total, compared=total.compared + tally.compared, left=total.left + tally.left,
                failures=total.failures + tally.failures,
            )  # fmt: skip
        vectors: dict[str, int] = {}
        if not chosen.no_checks:
            for part in pool.starmap(golden, [(start, chosen.processes) for start in range(chosen.processes)]):
                for reason, count in part.items():
                    vectors[reason] = vectors.get(reason, 0) + count
    checks = vectors.get("agree", 0)
    for reason, count in sorted(vectors.items()):
        print(f"golden vectors, {count}: {reason}")
        if reason.startswith("DIFFERS"):
            total.failures.append(reason)
    print(f"{total.compared} cases after {time.time() - started:.0f} s", flush=True)
    if not chosen.no_checks:
        from tests.gpu.checks import CHECKS
        from tests.gpu.cuda_checks import CHECKS as TABLES
        from tests.gpu.search_checks import CHECKS as SEARCHES

        for name, check in (CHECKS | TABLES | SEARCHES).items():
            begun = time.time()
            try:
                made = check()
                checks += made
                print(f"{name}: {made} in {time.time() - begun:.1f} s", flush=True)
            except Exception:
                total.failures.insert(0, f"{name}: {traceback.format_exc(limit=-3)}")
    for failure in total.failures[:40]:
        print(failure)
    seconds = time.time() - started
    print(
        f"{total.compared} cases of the matrix and {checks} checks on {torch.cuda.get_device_name()}: "
        f"{len(total.failures)} failures, {total.left} pairs left out, {seconds:.0f} s"
    )
    complete = total.compared >= ENOUGH and not total.left
    return 0 if complete and not total.failures else 1


if __name__ == "__main__":
    sys.exit(main())
