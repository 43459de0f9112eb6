"""A conversion on a cluster in a process of its own, which a task may kill:

python -m tests.scale.driver ADDRESS SRC DST FOLDER
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from halfbyte.scale import convert
from halfbyte.scale.cluster import Settings, connect
from tests.checkpoint.execute.scenes import ONE, plan_of
from tests.scale.faults import Folder, faulty


def main(address: str, source: Path, destination: Path, folder: Path) -> None:
    Folder(folder).note("driver", str(os.getpid()))
    with pytest.MonkeyPatch.context() as patch, connect(Settings(address)) as cluster:
        patch.setattr(convert, "write_part", faulty(folder))
        convert.run_on_cluster(plan_of(source), destination, cluster, ONE)


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:]))
