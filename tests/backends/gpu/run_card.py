"""The bit-identity matrix on a card, with torch, Triton, numpy and ml_dtypes alone.

    python3 -m tests.backends.gpu.run_card

Every case of tests/backends/cases.py that has a GPU kernel, against the numpy reference, by CUDA C++ kernels as well
where they serve; the searches of search_cases.py; what only a card can show (the checks); the peers' golden vectors.
Exit code 0 only if there is a card, at least 2000 comparisons were made, and all bits are equal. Work is spread over
processes, long pieces first: kernels have to be compiled, and the reference is slow.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

ENOUGH = 2000
SEED = 20
GOLDEN_PARTS = 32
PROGRESS_SECONDS = 20
MAIN_PROCESS = ("compiled",)
"""torch.compile may start processes of its own, which those of a pool must not."""


@dataclass(frozen=True)
class Task:
    """A piece of work for one process."""

    kind: str
    index: int = 0
    name: str = ""
    """The dtype of a case, the name of a check."""
    deadline: float = 1e18


@dataclass
class Tally:
    """What a process found."""

    compared: int = 0
    checks: int = 0
    left: int = 0
    """Pieces that there was no time for."""
    failures: list[str] = field(default_factory=list)
    golden: Counter[str] = field(default_factory=Counter)
    note: str = ""

    def add(self, other: Tally) -> None:
        self.compared += other.compared
        self.checks += other.checks
        self.left += other.left
        self.failures += other.failures
        self.golden += other.golden


def pairs(full: bool) -> list[tuple[int, str]]:
    """(case, dtype), exact searches first because they compile slowly.

    Compiling takes most of the time. So a case of an exact search takes one dtype, the next one the next. `full`: all.
    """
    from halfbyte.backends.gpu.choose import ChosenKernel, choose
    from tests.backends.cases import DTYPES, EXACT, every_case

    listed = []
    for index, case in enumerate(every_case()):
        if not isinstance(choose(case.request()), ChosenKernel):
            continue
        dtypes = list(DTYPES)
        if not full and case.method in EXACT:
            dtypes = [dtypes[index % 3]]
        listed += [(index, dtype) for dtype in dtypes]
    np.random.default_rng(SEED).shuffle(listed)
    shuffled = [(int(index), str(dtype)) for index, dtype in listed]
    return sorted(shuffled, key=lambda pair: every_case()[pair[0]].method not in EXACT)


def search_pairs(full: bool) -> list[int]:
    """Which pairs of search_cases.py: one dtype of each case, or all."""
    from tests.backends.gpu import search_cases

    first: dict[str, int] = {}
    for index, (case, _) in enumerate(search_cases.pairs()):
        first.setdefault(str(case), index)
    return list(range(len(search_cases.pairs()))) if full else sorted(first.values())


def matrix(task: Task) -> Tally:
    """One case and dtype, on all inputs."""
    from tests.backends.cases import INPUTS, every_case, fits, make_input
    from tests.backends.gpu.card.cuda_checks import kernels

    tally, case, dtype = Tally(), every_case()[task.index], task.name
    for name in INPUTS:
        x = make_input(name, dtype)
        if not fits(case, x):
            continue
        for tables in (False, True) if served_by_tables(case, dtype) else (False,):
            with kernels(tables):
                problem = compare(case, x)
            tally.compared += 1
            if problem:
                tally.failures.append(f"{case} {dtype} {name}{', tables' if tables else ''}: {problem}")
    return tally


def search(task: Task) -> Tally:
    """One case and dtype of search_cases.py."""
    from tests.backends.gpu import search_cases

    compared, failures = search_cases.compare_some(task.index, len(search_cases.pairs()))
    return Tally(compared=compared, failures=failures)


def check(task: Task) -> Tally:
    """One of the checks."""
    begun = time.time()
    made = checks()[task.name]()
    return Tally(checks=made, note=f"{task.name}: {made} in {time.time() - begun:.1f} s")


def checks() -> dict[str, Callable[[], int]]:
    from tests.backends.gpu.card import call_checks, checks, convert_checks, cuda_checks, headroom_checks, search_checks

    listed = checks.CHECKS | call_checks.CHECKS | convert_checks.CHECKS | cuda_checks.CHECKS | search_checks.CHECKS
    listed |= headroom_checks.CHECKS
    return {name: check for name, check in listed.items() if check is not search_checks.searches}


def served_by_tables(case: object, dtype: str) -> bool:
    """Whether a CUDA C++ kernel can serve a case, as well as Triton's."""
    from halfbyte.backends.gpu.choose import ChosenKernel, choose
    from tests.backends.cases import Case

    if not isinstance(case, Case):
        raise TypeError("this takes a case")
    kernel = choose(case.request(dtype))
    return isinstance(kernel, ChosenKernel) and kernel.table is not None


def golden(task: Task) -> Tally:
    """One part of the peers' golden vectors with this backend; counts the reasons why a case does not agree."""
    from pathlib import Path

    from halfbyte.conform import load_vectors
    from halfbyte.conform.runner import run_case
    from halfbyte.errors import BackendError

    vectors = load_vectors(Path(__file__).parents[3] / "conformance" / "vectors.zip")
    tally = Tally()
    for entry in list(vectors)[task.index :: GOLDEN_PARTS]:
        try:
            result = run_case(vectors.case(entry), "gpu")
            if result.status != "agree":
                tally.failures.append(f"{result.name}: {result.detail}")
            tally.golden["agree" if result.status == "agree" else "DIFFER"] += 1
        except BackendError as error:
            tally.golden[str(error)] += 1
    tally.checks = tally.golden["agree"]
    return tally


KINDS: dict[str, Callable[[Task], Tally]] = {"search": search, "check": check, "golden": golden, "matrix": matrix}


def perform(task: Task) -> Tally:
    """Any piece; what it raises is a failure."""
    if time.time() > task.deadline:
        return Tally(left=1)
    try:
        return KINDS[task.kind](task)
    except Exception:
        return Tally(failures=[f"{task.kind} {task.index} {task.name}: {traceback.format_exc(limit=-3)}"])


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
        block=case.block, tile=case.tile, scaling=case.scaling, backend="gpu",
    )  # fmt: skip
    expected = case.quantize(x, "reference")
    for part in ("scales", "codes", "stored_scale", "global_scale"):
        mine, wanted = getattr(got, part), getattr(expected, part)
        if (mine is None) != (wanted is None):
            return f"{part} is there on one side only"
        if wanted is not None and (difference := find_difference(mine, wanted, any_nan=True)) is not None:
            return f"{part}: {difference.reason}"
    for dtype in ("float32", "bfloat16", "float16") if case.method == "amax" else ():
        decoded = hb.dequantize(got, dtype, backend="gpu")
        difference = find_difference(decoded, hb.dequantize(expected, dtype, backend="reference"), any_nan=True)
        if difference is not None:
            return f"decoded to {dtype}: {difference.reason}"
    return None


def tasks(only: str, full: bool, with_checks: bool, part: tuple[int, int], deadline: float) -> list[Task]:
    """All pieces of work, long ones first."""
    from tests.backends.cases import every_case

    listed = []
    if with_checks:
        listed += [Task("search", index) for index in search_pairs(full)]
        listed += [Task("check", name=name) for name in checks() if name not in MAIN_PROCESS]
        listed += [Task("golden", index) for index in range(GOLDEN_PARTS)]
    cases = every_case()
    listed += [Task("matrix", index, dtype) for index, dtype in pairs(full) if only in str(cases[index])]
    return [replace(task, deadline=deadline) for task in listed[part[0] :: part[1]]]


def part_of(text: str) -> tuple[int, int]:
    """`2/3` as (1, 3): from the second piece on every third."""
    number, _, count = text.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"a part is given as 2/3, not {text!r}")
    return int(number) - 1, int(count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="run cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop the matrix after so long; it then fails")
    parser.add_argument("--processes", type=int, default=max(1, min(16, os.cpu_count() or 1)))
    parser.add_argument("--full", action="store_true", help="every dtype for every search: ten minutes and more")
    parser.add_argument("--part", type=part_of, default="1/1", metavar="I/N", help="one of N equal parts of the work")
    parser.add_argument("--no-checks", action="store_true", help="the matrix alone")
    chosen = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("no CUDA device: the GPU tests need one", file=sys.stderr)
        return 1
    started = time.time()
    deadline = started + chosen.seconds
    total = Tally()
    with multiprocessing.get_context("spawn").Pool(chosen.processes) as pool:
        work = tasks(chosen.only, chosen.full, not chosen.no_checks, chosen.part, deadline)
        found = pool.imap_unordered(perform, work)
        first = not chosen.no_checks and chosen.part[0] == 0
        here = [perform(Task("check", name=name)) for name in MAIN_PROCESS if first]
        told = started
        for tally in itertools.chain(here, found):
            total.add(tally)
            for line in [tally.note] * bool(tally.note) + tally.failures:
                print(line, flush=True)
            if time.time() - told > PROGRESS_SECONDS:
                told = time.time()
                print(f"{told - started:.0f} s: {total.compared} cases, {total.checks} checks", flush=True)
    for reason, count in sorted(total.golden.items()):
        print(f"golden vectors, {count}: {reason}")
    seconds = time.time() - started
    print(
        f"{total.compared} cases and {total.checks} checks on {torch.cuda.get_device_name()}: "
        f"{len(total.failures)} failures, {total.left} pieces left out, {seconds:.0f} s"
    )
    complete = total.compared >= ENOUGH and not total.left
    return 0 if complete and not total.failures else 1


if __name__ == "__main__":
    sys.exit(main())
