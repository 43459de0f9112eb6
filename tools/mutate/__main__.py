"""Change the code in small ways and see whether the tests notice: a sample of mutations of some folders.

    python -m tools.mutate casting verify --sample 60 --seed 0

Mutations are tried in a copy of the repository. Before the first one, every test runs once to see which functions it
calls (some minutes; `--calls FILE` keeps the result, and the next time only new or changed files of tests run). It
prints the mutations that no test
noticed, and a table. reviewed.toml lists mutations that change nothing a test may hold; these are not tried, and
counted apart.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from tools.mutate.changes import Mutation, mutations
from tools.mutate.pytest_run import preload
from tools.mutate.reviewed import reviewed
from tools.mutate.trial import Record, Trials, copy_of_the_repository, read_record, record

TESTS = [
    *(
        f"tests/{folder}"
        for folder in ("contracts", "casting", "checkpoint", "layouts", "verify", "cli", "methods", "conform")
    ),
    *(
        f"tests/test_{name}.py"
        for name in (
            "ledger",
            "quantize",
            "resolution",
            "messages",
            "mistakes",
            "online",
            "no_rows",
            "search",
            "types",
            "saved",
            "dataclasses",
        )
    ),
]
NEEDS_A_CARD = tuple(f"src/halfbyte/checkpoint/execute/device/{name}.py" for name in ("cuda", "cuda_runtime"))
"""Left out: without a GPU no test runs them."""


@dataclass
class Count:
    """What became of the sample of one folder."""

    every: int
    noticed: int = 0
    unnoticed: int = 0
    reviewed: int = 0


def sample(folder: str, size: int, seed: int) -> tuple[list[Mutation], int]:
    """Some mutations of a folder or file under src/halfbyte, and how many there are.

    They are those with the smallest hashes of seed, place and change, so that a change elsewhere leaves the sample.
    """
    place = Path("src/halfbyte", folder)
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    files = [path for path in files if path.as_posix() not in NEEDS_A_CARD]
    every = [mutation for file in files for mutation in mutations(file)]

    def lot(mutation: Mutation) -> bytes:
        place = f"{seed} {mutation.path.as_posix()} {mutation.function} {mutation.line} {mutation.change}"
        return hashlib.sha256(place.encode()).digest()

    return sorted(every, key=lot)[:size], len(every)


def table(counts: dict[str, Count]) -> str:
    """One line per folder and one for all, in Markdown."""
    total = Count(*(sum(getattr(count, name) for count in counts.values()) for name in vars(Count(0))))
    lines = ["| folder | mutations | tried | noticed | unnoticed | reviewed, not tried | share noticed |"]
    lines.append("|---|---|---|---|---|---|---|")
    for folder, count in [*counts.items(), ("all", total)]:
        tried = count.noticed + count.unnoticed
        share = f"{100 * count.noticed / tried:.1f} %" if tried else "–"
        cells = (folder, count.every, tried, count.noticed, count.unnoticed, count.reviewed, share)
        lines.append("| " + " | ".join(f"{cell:,}" if isinstance(cell, int) else cell for cell in cells) + " |")
    return "\n".join(lines)


def recorded(copy: Path, path: Path | None, tests: list[str]) -> Record:
    known = read_record(path.read_text()) if path is not None and path.exists() else None
    found = record(copy, tests, known)
    if path is not None:
        path.write_text(found.as_json())
    return replace(found, tests=[test for test in found.tests if test.name.startswith(tuple(tests))])


trials: Trials
"""Of a process that tries mutations."""


def start_worker(place: Path, record: Record, seconds: float) -> None:
    global trials
    trials = Trials(copy_of_the_repository(Path(tempfile.mkdtemp(dir=place))), record, seconds)


def attempt(chosen: tuple[str, Mutation]) -> tuple[str, Mutation, str, float]:
    """Which test noticed, and after how many seconds."""
    folder, mutation = chosen
    begin = time.monotonic()
    test = trials.noticed_by(mutation)
    return folder, mutation, test, time.monotonic() - begin


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", help="or files, under src/halfbyte")
    parser.add_argument("--tests", nargs="+", default=TESTS, help="folders and files of tests")
    parser.add_argument("--sample", type=int, default=50, help="how many mutations of each folder to try")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=Path, help="where to keep what each test calls")
    parser.add_argument("--match", default="", help="of the sample, only mutations whose printed line has this text")
    parser.add_argument(
        "--seconds", type=float, default=600, help="of tests to run for one mutation, the most specific ones first"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at once")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the copies go away
    preload()
    equivalent = reviewed()
    counts, chosen = {}, []
    for folder in given.folders:
        picked, every = sample(folder, given.sample, given.seed)
        picked = [mutation for mutation in picked if given.match in str(mutation)]
        tried = [mutation for mutation in picked if not any(entry.has(mutation) for entry in equivalent)]
        counts[folder] = Count(every, reviewed=len(picked) - len(tried))
        chosen += [(folder, mutation) for mutation in tried]
    with tempfile.TemporaryDirectory(prefix="mutate-") as name:
        place = Path(name)
        tests = recorded(copy_of_the_repository(place / "recorded"), given.calls, given.tests)
        pool = multiprocessing.get_context("fork").Pool(given.jobs, start_worker, (place, tests, given.seconds))
        with pool:
            for folder, mutation, test, took in pool.imap_unordered(attempt, chosen):
                if test:
                    counts[folder].noticed += 1
                else:
                    counts[folder].unnoticed += 1
                    print(f"unnoticed: {mutation}", flush=True)
                print(f"{took:.1f} s, {mutation}, {test or 'UNNOTICED'}", file=sys.stderr, flush=True)
    print(f"seed {given.seed}\n{table(counts)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
