"""Statistics by parts of the windows: what one run gives, up to rounding, and the same bytes whoever computed them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from halfbyte.calibration.collect import Options, calibrate
from halfbyte.errors import CheckpointError, InputError
from halfbyte.scale.calibrate import calibrate_on_cluster
from halfbyte.statistics import Statistics
from tests.calibration.scenes import model, windows
from tests.checkpoint.toy import all_bytes
from tests.scale.in_process import InProcess


def on_cluster(path: Path, target: Path, parts: int) -> Statistics:
    return calibrate_on_cluster(path, windows(), target, InProcess(), Options(), parts)


def test_parts_add_up_to_one_run(tmp_path: Path) -> None:
    """Experts that saw few tokens in a part are judged by all of their tokens."""
    path = model(tmp_path, "qwen3_moe")
    whole = calibrate(path, windows(), tmp_path / "whole")
    parts = on_cluster(path, tmp_path / "d", 3)
    assert set(parts.names) == set(whole.names)
    for module in whole.names:
        one, other = whole.get(module), parts.get(module)
        assert one is not None
        assert other is not None
        assert (one.tokens, one.input_amax) == (other.tokens, other.input_amax), module
        assert (one.second_moment is None) == (other.second_moment is None), module
        for (part, a), (same, b) in zip(one.arrays(), other.arrays(), strict=True):
            assert part == same
            assert np.allclose(a, b, rtol=1e-5, atol=1e-6 * float(np.abs(a).max())), (module, part)
    assert parts.header["few_tokens"] == whole.header["few_tokens"]


def test_a_run_that_was_stopped_ends_with_the_same_bytes(tmp_path: Path) -> None:
    path = model(tmp_path)
    on_cluster(path, tmp_path / "d", 2)
    for lost in ("part-00000-of-00002/layer-00001.safetensors", "part-00001-of-00002/statistics.json"):
        assert (tmp_path / "d.parts" / lost).exists()
    (tmp_path / "e.parts").mkdir()
    (tmp_path / "d.parts" / "part-00001-of-00002").rename(tmp_path / "e.parts" / "part-00001-of-00002")
    on_cluster(path, tmp_path / "e", 2)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "e")
    assert on_cluster(path, tmp_path / "e", 2).names


def test_refusals(tmp_path: Path) -> None:
    path = model(tmp_path)
    on_cluster(path, tmp_path / "d", 2)
    with pytest.raises(InputError, match="has statistics of another run; give a new folder"):
        on_cluster(path, tmp_path / "d", 3)
    with pytest.raises(CheckpointError, match=r" \(on "):
        on_cluster(tmp_path / "nowhere", tmp_path / "f", 2)
