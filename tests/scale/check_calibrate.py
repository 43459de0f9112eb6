"""Statistics on a real cluster, whose processes load torch: the bytes of parts that this process computes.

`make test-scale`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.calibration.collect import Options
from halfbyte.scale.calibrate import calibrate_on_cluster
from halfbyte.scale.cluster import Settings, connect
from tests.calibration.scenes import model, windows
from tests.checkpoint.toy import all_bytes
from tests.scale.in_process import InProcess
from tests.scale.local_cluster import local_cluster


@pytest.mark.filterwarnings("default")
def test_on_a_cluster(tmp_path: Path) -> None:
    path = model(tmp_path)
    calibrate_on_cluster(path, windows(), tmp_path / "here", InProcess(), Options(), 3)
    with local_cluster(2) as local, connect(Settings(local.address)) as cluster:
        calibrate_on_cluster(path, windows(), tmp_path / "there", cluster, Options(), 3)
    assert all_bytes(tmp_path / "there") == all_bytes(tmp_path / "here")
