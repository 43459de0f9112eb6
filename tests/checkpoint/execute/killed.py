"""A program for the tests of resumption: convert, be killed at one place after another, continue, compare. It may
continue with more modules kept.

Every system call that changes a disk counts. The call at which the child is killed is carried out by half, if it is a
write. Each child is a fork of this process, which has one thread.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.io.index import MANIFEST
from halfbyte.codec.bits import U8
from tests.checkpoint.toy import all_bytes

RESOURCES = Resources(workers=2, max_memory=1 << 28, chunk=2000)


class Bomb:
    """Counts calls and kills the process at one of them."""

    def __init__(self, fuse: int) -> None:
        self.fuse, self.calls = fuse, 0

    def _tick(self) -> bool:
        self.calls += 1
        return self.calls == self.fuse

    def around(self, call: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **options: object) -> object:
            if self._tick():
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return counted

    def pwrite(self, call: Callable[[int, memoryview, int], int]) -> Callable[[int, memoryview, int], int]:
        def counted(descriptor: int, data: memoryview, offset: int) -> int:
            if self._tick():
                call(descriptor, data[: len(data) // 2], offset)
                os.kill(os.getpid(), signal.SIGKILL)
            return call(descriptor, data, offset)

        return counted


def one_by_one(disk: Disk, file: int, parts: Sequence[tuple[U8, int]]) -> None:
    """Each write by a call of its own, so that it can be counted."""
    for data, offset in parts:
        disk.write_at(file, data.data, offset)


def convert(source: Path, destination: Path, fuse: int, keep: Sequence[str]) -> int:
    """Convert with a bomb that goes off at that call (0: never); the number of calls."""
    bomb = Bomb(fuse)
    calls = {name: bomb.around(getattr(os, name)) for name in ("replace", "fsync", "ftruncate", "mkdir")}
    Disk.write_parts = one_by_one  # type: ignore[method-assign]
    vars(os).update(calls, pwrite=bomb.pwrite(os.pwrite))
    run(make_plan(source, Options(method="amax", rules=Rules(keep=tuple(keep)))), destination, RESOURCES)
    return bomb.calls


def in_child(source: Path, destination: Path, fuse: int, keep: Sequence[str] = ()) -> int:
    """The child's exit status, or the negative of the signal that ended it."""
    child = os.fork()
    if child == 0:
        try:
            calls = convert(source, destination, fuse, keep)
            (destination.parent / "calls").write_text(str(calls))
            os._exit(0)
        except BaseException as error:
            print(type(error).__name__, error, file=sys.stderr, flush=True)
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main(source: Path, folder: Path, steps: int, keep: Sequence[str]) -> None:
    """`keep`: modules that the second and the third run of each conversion keep, and the first does not."""
    whole = folder / "whole"
    if in_child(source, folder / "kept", 0, keep) != 0 or in_child(source, whole, 0) != 0:
        raise SystemExit("the uninterrupted run failed")
    before, expected = all_bytes(whole), all_bytes(folder / "kept")
    calls = int((folder / "calls").read_text())
    report: dict[str, object] = {"calls": calls, "killed": 0, "half_checkpoints": 0}
    fuses = sorted({1 + (calls - 1) * step // (steps - 1) for step in range(steps)})
    for fuse in fuses:
        destination = folder / f"killed-{fuse}"
        status = in_child(source, destination, fuse)
        report["killed"] = int(str(report["killed"])) + (status == -signal.SIGKILL)
        if (destination / "config.json").exists():  # then it is a checkpoint, and must be all of one
            there = all_bytes(destination)
            half = any(there.get(name) != data for name, data in before.items() if name != MANIFEST)
            report["half_checkpoints"] = int(str(report["half_checkpoints"])) + half
        again = fuse + 7  # and once more, further on
        if keep and (destination / MANIFEST).exists():  # it is finished, and other options would be refused
            keep_now: Sequence[str] = ()
        else:
            keep_now = keep
        in_child(source, destination, again, keep_now)
        if in_child(source, destination, 0, keep_now) != 0:
            raise SystemExit(f"killed at call {fuse}: cannot continue")
        found, wanted = all_bytes(destination), expected if keep_now else before
        if found != wanted:
            different = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
            raise SystemExit(f"killed at call {fuse}: other bytes in {different}")
        shutil.rmtree(destination)
    print(json.dumps(report | {"fuses": len(fuses)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
