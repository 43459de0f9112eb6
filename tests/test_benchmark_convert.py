"""The benchmark of convert: it runs, it writes its report, and it notices a wrong bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import convert
from benchmarks.synthetic import write_experts
from halfbyte.checkpoint import Options, Resources, make_plan, run


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("benchmark")
    options = ["--quick", "--rounds", "1", "--folder", str(folder), "--json", str(folder / "report.json")]
    assert convert.main(options) == 0
    assert [path.name for path in folder.iterdir()] == ["report.json"]  # it removes its other files
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_every_way_is_timed(report: dict[str, Any]) -> None:
    rows = report["speed"]["rows"]
    assert set(rows) == {
        "cp -r", "convert, amax", "convert, optimal", "cp -r, on disk", "convert, amax, on disk",
    }  # fmt: skip
    assert rows["cp -r"]["x_cp"] == rows["cp -r, on disk"]["x_cp"] == 1
    for row in rows.values():
        assert row["gb_s"] == pytest.approx(report["checkpoint"]["bytes"] / row["best_s"] / 1e9)


def test_bits_are_checked(report: dict[str, Any]) -> None:
    assert report["speed"]["hashes_equal"]
    assert report["usual_way"]["equal"]
    assert report["usual_way"]["ratio"] > 0


def test_growth_and_plan_are_measured(report: dict[str, Any]) -> None:
    sizes = [row["bytes"] for row in report["linear"]]
    assert sizes == sorted(sizes)
    assert len(sizes) == 3
    assert report["plan"]["tensors"] == 4 * (3 * 25 + 2)
    assert report["plan"]["seconds"] > 0


def test_a_changed_byte_is_seen(tmp_path: Path) -> None:
    made = write_experts(tmp_path / "s", 1, 1, 32, 64)
    run(make_plan(made.path, Options(method="amax")), tmp_path / "d", Resources(workers=1, sync=False))
    assert convert.hashes_equal(tmp_path / "d")
    shard = next((tmp_path / "d").glob("*.safetensors"))
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    assert not convert.hashes_equal(tmp_path / "d")
