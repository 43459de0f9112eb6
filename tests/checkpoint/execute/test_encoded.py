"""Pieces that one call takes from the source to the shard: the bytes of the long way, however they are read and cut."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from halfbyte.backends.sha256 import can_hash
from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute import encoded, unit
from halfbyte.checkpoint.io.files import Files
from halfbyte.errors import CheckpointError
from tests.checkpoint.toy import all_bytes, random, write_checkpoint

pytestmark = pytest.mark.skipif(not can_hash(), reason="the compiled kernels are missing, or SHA instructions are")

AT = "model.layers.0.mlp"
TO = [
    Options(method="amax"),
    Options(method="optimal"),
    Options(contract="transformer_engine", method="four_six"),
    Options(to="mxfp4", layout="compressed-tensors"),
]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Gate and up of several pieces and with a part of a leaf, down with whole leaves."""
    tensors = {f"{AT}.{name}_proj.weight": random(3 + len(name), 1032, 1024) for name in ("gate", "up")}
    tensors[f"{AT}.down_proj.weight"] = random(9, 1024, 1024, dtype=np.float16)
    return write_checkpoint(tmp_path / "source", tensors, shards=2)


def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """For each piece that is encoded, whether it was read on the way and whether it worked."""
    calls: list[tuple[bool, bool]] = []
    real = encoded.encode_piece

    def encode_piece(*arguments: Any) -> bool:
        worked = real(*arguments)
        calls.append((arguments[4].raw is None, worked))
        return worked

    monkeypatch.setattr(unit, "encode_piece", encode_piece)
    return calls


@pytest.mark.parametrize("options", TO, ids=["amax", "optimal", "four_six", "mxfp4"])
def test_the_bytes_of_the_long_way(
    tmp_path: Path, source: Path, options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(source, options)
    with monkeypatch.context() as patched:
        patched.setattr(unit, "encoder_for", lambda engine, unit: None)
        run(plan, tmp_path / "long", Resources(1, sync=False))
    expected = all_bytes(tmp_path / "long")
    calls = counted(monkeypatch)
    monkeypatch.setattr(unit, "MANY", 1)
    for number, (cached, chunk, workers) in enumerate([(True, 32 << 20, 1), (False, 32 << 20, 2), (True, 1 << 20, 3)]):
        monkeypatch.setattr(Files, "is_cached_here", lambda self, file, cached=cached: cached)
        calls.clear()
        run(plan, tmp_path / str(number), Resources(workers, sync=False, chunk=chunk))
        assert all_bytes(tmp_path / str(number)) == expected
        assert len(calls) == (3 if chunk > 1 << 20 else 8)
        assert all(worked for _, worked in calls)
        if options.to == "mxfp4" or (cached and options.method != "optimal"):
            assert all(read for read, _ in calls)
        else:
            assert not all(read for read, _ in calls), "the worker that finds a scale holds what it read"


def test_pieces_that_end_within_a_leaf_go_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_checkpoint(tmp_path / "s", {f"{AT}.down_proj.weight": random(1, 1000, 1056)})
    plan, calls = make_plan(made, Options(method="amax")), counted(monkeypatch)
    run(plan, tmp_path / "whole", Resources(1, sync=False))
    assert [worked for _, worked in calls] == [True]
    calls.clear()
    run(plan, tmp_path / "cut", Resources(1, sync=False, chunk=500_000))
    assert {worked for _, worked in calls} == {False}
    assert all_bytes(tmp_path / "cut") == all_bytes(tmp_path / "whole")


def test_a_worker_with_little_memory_goes_the_long_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call has buffers of its own, nearly a megabyte, which count in the limit."""
    made = write_checkpoint(tmp_path / "s", {f"{AT}.down_proj.weight": random(1, 64, 512)})
    plan, calls = make_plan(made, Options(method="amax")), counted(monkeypatch)
    for limit in (700_000, 2_000_000):
        run(plan, tmp_path / str(limit), Resources(1, max_memory=limit, sync=False))
    assert [worked for _, worked in calls] == [True]
    assert all_bytes(tmp_path / "700000") == all_bytes(tmp_path / "2000000")


def test_a_source_that_is_cut_while_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = write_checkpoint(tmp_path / "s", {f"{AT}.down_proj.weight": random(1, 512, 1024)})
    plan, real = make_plan(made, Options(method="amax")), encoded.encode_piece
    path = made / "model.safetensors"

    def encode_piece(*arguments: Any) -> bool:
        with path.open("r+b") as file:
            file.truncate(path.stat().st_size - 1000)
        return real(*arguments)

    monkeypatch.setattr(unit, "encode_piece", encode_piece)
    monkeypatch.setattr(Files, "is_cached_here", lambda self, file: True)
    monkeypatch.setattr(unit, "MANY", 1)
    end = path.stat().st_size - 1000
    with pytest.raises(CheckpointError, match=rf"model.safetensors ended at byte {end}: it was cut since the plan"):
        run(plan, tmp_path / "d", Resources(1, sync=False))
    assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}


@pytest.mark.parametrize("value", [1e30, np.nan, np.inf])
@pytest.mark.parametrize("which", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_a_source_that_changes_between_its_two_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float, which: str
) -> None:
    """The scale was made for other values. That is said, whatever they are now, and whichever partner has them."""
    tensors = {f"{AT}.{name}_proj.weight": random(len(name), 512, 1024) for name in ("gate", "up")}
    made = write_checkpoint(tmp_path / "s", tensors, {"num_hidden_layers": 1}, shards=2)
    original, modified = (made / which).read_bytes(), (made / which).stat().st_mtime_ns
    plan, real = make_plan(made, Options(method="amax")), encoded.encode_piece

    def encode_piece(*arguments: Any) -> bool:
        with (made / which).open("r+b") as file:
            file.seek(-2, os.SEEK_END)
            file.write(np.array(value).astype(ml_dtypes.bfloat16).tobytes())
        os.utime(made / which, ns=(7, 7))
        return real(*arguments)

    monkeypatch.setattr(unit, "encode_piece", encode_piece)
    monkeypatch.setattr(Files, "is_cached_here", lambda self, file: True)
    monkeypatch.setattr(unit, "MANY", 1)
    for workers in (1, 2):
        with pytest.raises(CheckpointError, match=rf"s/{which} changed while it was converted; begin anew"):
            run(plan, tmp_path / "d", Resources(workers, sync=False))
        assert {path.name for path in (tmp_path / "d").iterdir()} == {".halfbyte"}
        shutil.rmtree(tmp_path / "d")
        (made / which).write_bytes(original)
        os.utime(made / which, ns=(7, modified))


@pytest.mark.parametrize("options", [TO[0], TO[-1]], ids=["amax", "mxfp4"])
def test_a_source_that_is_gone_is_named(tmp_path: Path, options: Options) -> None:
    made = write_checkpoint(tmp_path / "s", {f"{AT}.down_proj.weight": random(1, 512, 1024)})
    plan = make_plan(made, options)
    (made / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"s/model.safetensors cannot be read.*No such file"):
        run(plan, tmp_path / "d", Resources(1, sync=False))


def test_a_block_that_has_no_scale_is_named(tmp_path: Path) -> None:
    x = random(1, 512, 1024)
    x[300, 5] = ml_dtypes.bfloat16(np.inf)
    made = write_checkpoint(tmp_path / "s", {f"{AT}.down_proj.weight": x})
    for options in (Options(method="amax"), TO[-1]):
        with pytest.raises(CheckpointError, match="down_proj"):
            run(make_plan(made, options), tmp_path / f"d{options.to}", Resources(1, sync=False))
