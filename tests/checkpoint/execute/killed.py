"""A program for test_killed.py: conversions whose process is killed by a real signal at several operations."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path

from tests.checkpoint.execute.recorder import Recorder
from tests.checkpoint.execute.scenes import Scene, on_disk, plan_of

STEPS = 9


class Bomb(Recorder):
    """Ends the process where a recorder would stop it."""

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def killed_in_child(scene: Scene, root: Path, at: int) -> bool:
    """Whether a run that should be killed at that operation was. The child is a fork; this process has one thread."""
    child = os.fork()
    if child == 0:
        try:
            with on_disk(Bomb(root, kill_at=at)):
                scene.run(root)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def main(source: Path) -> None:
    scene = Scene(plan_of(source))
    last = len(scene.operations) - 1
    for at in (last * step // (STEPS - 1) for step in range(STEPS)):
        with scene.disk() as root:
            if not killed_in_child(scene, root, at):
                raise SystemExit(f"not killed at operation {at}")
            scene.check_finished(root, promised=0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
