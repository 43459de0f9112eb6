"""A program for test_faults.py: conversions on a system that does as little as it may, or fails at any read or write.

Runs with faults.c before the C library, so that what the compiled kernels read and write meets it, too.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from halfbyte.checkpoint import Options, Plan, Resources, make_plan, run
from halfbyte.checkpoint.execute import unit
from halfbyte.errors import CheckpointError
from tests.backends.test_device_reading import LateRuntime, reader_with
from tests.checkpoint.toy import all_bytes

READ, WRITE = 0, 1
SAID = {
    (READ, errno.EIO): "cannot be read after byte",
    (READ, 0): "it was cut since the plan was made",
    (WRITE, errno.ENOSPC): "no space left for",
    (WRITE, 0): "no space left for",
}
"""Kind of call, and the system's number for an error, or 0 if nothing is transferred → what the user is told."""


class Faults:
    """What goes wrong, in the library that stands before the system's."""

    def __init__(self) -> None:
        self.library = ctypes.CDLL(None)
        self.clear()

    def number(self, name: str) -> ctypes.c_long:
        return ctypes.c_long.in_dll(self.library, name)

    @property
    def calls(self) -> ctypes.Array[ctypes.c_long]:
        return (ctypes.c_long * 2).in_dll(self.library, "calls")

    def clear(self) -> None:
        self.number("most").value = self.number("interrupted").value = 0
        ctypes.c_int.in_dll(self.library, "ends").value = 0
        for kind in (READ, WRITE):
            self.calls[kind] = 0
            (ctypes.c_long * 2).in_dll(self.library, "fails_at")[kind] = -1

    @contextmanager
    def few_bytes(self, most: int, interrupted: int) -> Iterator[None]:
        self.number("most").value, self.number("interrupted").value = most, interrupted
        yield
        self.clear()

    @contextmanager
    def fails(self, kind: int, call: int, number: int) -> Iterator[None]:
        """One call fails, and those after it do not. number: of the error; 0: nothing is transferred."""
        self.clear()
        (ctypes.c_long * 2).in_dll(self.library, "fails_at")[kind] = call
        (ctypes.c_int * 2).in_dll(self.library, "fails_with")[kind] = number
        ctypes.c_int.in_dll(self.library, "ends").value = int(number == 0)
        yield
        self.clear()


def check_each_call(faults: Faults, plan: Plan, into: Path, expected: dict[str, bytes], workers: int) -> None:
    """Every read and every write fails once. The run says so, and the next one ends with the right bytes."""
    resources = Resources(workers, sync=False)
    faults.clear()
    run(plan, into, resources)
    counts = list(faults.calls)
    shutil.rmtree(into)
    for (kind, number), said in SAID.items():
        for call in range(counts[kind]):
            try:
                with faults.fails(kind, call, number):
                    run(plan, into, resources)
            except CheckpointError as error:
                faults.clear()
                if said not in str(error):
                    raise SystemExit(f"error {number} of call {call} is said to be: {error}") from error
            else:
                raise SystemExit(f"error {number} of call {call} of kind {kind} is lost")
            if {entry.name for entry in into.iterdir()} - {".halfbyte", *expected}:
                raise SystemExit(f"error {number} of call {call} leaves {sorted(into.iterdir())}")
            if (into / "config.json").exists() and kind == READ:
                raise SystemExit(f"error {number} of call {call} ends with a config.json")
            run(plan, into, resources)
            if all_bytes(into) != expected:
                raise SystemExit(f"other bytes after error {number} of call {call} of kind {kind}")
            shutil.rmtree(into)


def check_reading_to_a_device(faults: Faults, source: Path) -> None:
    """What a device gets, and the amax that is found on the way, on a system that does as little as it may."""
    size = source.stat().st_size // 2 * 2
    runtime, device = LateRuntime(), np.zeros(size, np.uint8)
    reader = reader_with(runtime, step=1 << 16)
    with source.open("rb") as file:
        expected = reader.read(file.fileno(), 0, size, device.ctypes.data, np.dtype(np.float16))
        with faults.few_bytes(4999, 3):
            found = reader.read(file.fileno(), 0, size, device.ctypes.data, np.dtype(np.float16))
    runtime.run(len(runtime.queued))
    if device.tobytes() != source.read_bytes()[:size] or (found[0], str(found[1])) != (expected[0], str(expected[1])):
        raise SystemExit(f"a device gets other bytes: {found}, not {expected}")


def main(source: Path, folder: Path, method: str) -> None:
    faults = Faults()
    unit.MANY = 1  # every number of workers reads twice where that can be
    options = Options(to="mxfp4", layout="compressed-tensors") if method == "mxfp4" else Options(method=method)
    plan = make_plan(source, options)
    run(plan, folder / "whole", Resources(1, sync=False))
    expected = all_bytes(folder / "whole")
    for most, interrupted in ((0, 2), (4999, 0), (70_001, 3)):
        for workers in (1, 3):
            with faults.few_bytes(most, interrupted):
                run(plan, folder / "few", Resources(workers, sync=False, chunk=1 << 19))
            if all_bytes(folder / "few") != expected:
                raise SystemExit(f"other bytes in steps of {most}, every {interrupted}. call interrupted")
            shutil.rmtree(folder / "few")
    check_reading_to_a_device(faults, min(source.glob("*.safetensors")))
    check_each_call(faults, plan, folder / "faulty", expected, 1)


if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
