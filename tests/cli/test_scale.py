"""`halfbyte convert --rank`, `--engine ray` and `halfbyte finish`: what is refused, what is said, and exit codes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfbyte.checkpoint import run
from halfbyte.checkpoint.execute.journal import work_folder
from halfbyte.cli import app
from tests.checkpoint.execute.scenes import ONE, plan_of, small_source
from tests.checkpoint.toy import all_bytes

LAUNCHERS = ("RANK", "WORLD_SIZE", "JOB_COMPLETION_INDEX", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_ARRAY_TASK_ID")


def halfbyte(*arguments: object, **environment: str) -> Result:
    blank = dict.fromkeys(LAUNCHERS)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={**blank, **environment})


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return small_source(tmp_path / "source")


def test_ranks_and_finish(tmp_path: Path, source: Path) -> None:
    convert = ("convert", source, tmp_path / "d", "--method", "amax")
    first = halfbyte(*convert, "--rank", 0, "--world-size", 2)
    assert first.exit_code == 0, first.output
    assert "this rank has written 1 shard, 0 were there, and 2 of other ranks are missing" in first.output
    assert "if none did: halfbyte finish" in first.output
    early = halfbyte("finish", tmp_path / "d")
    assert early.exit_code == 2
    assert "2 shards are missing" in early.output
    assert "never begun: rank 1 of 2" in early.output
    last = halfbyte(*convert, "--rank", "auto", RANK="1", WORLD_SIZE="2")
    assert last.exit_code == 0, last.output
    assert "Next: halfbyte verify" in last.output
    run(plan_of(source), tmp_path / "one", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "one")
    again = halfbyte("finish", tmp_path / "d")
    assert (again.exit_code, "is whole already: nothing to do" in again.output) == (0, True)


def test_finish_closes_what_the_last_rank_left(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from halfbyte.checkpoint.execute import ranked

    with monkeypatch.context() as patch:
        patch.setattr(ranked, "_close_if_last", lambda *details: (False, 0))
        for rank in range(2):
            done = halfbyte("convert", source, tmp_path / "d", "--method", "amax", "--rank", rank, "--world-size", 2)
            assert "and all are there" in done.output
    assert work_folder(tmp_path / "d").exists()
    (source / "tokenizer.json").rename(source / "hidden")
    failed = halfbyte("finish", tmp_path / "d")
    assert (failed.exit_code, "cannot be read" in failed.output) == (1, True)
    (source / "hidden").rename(source / "tokenizer.json")
    done = halfbyte("finish", tmp_path / "d")
    assert (done.exit_code, "3 shards of all ranks. Next: halfbyte verify" in done.output) == (0, True)
    run(plan_of(source), tmp_path / "one", ONE)
    assert all_bytes(tmp_path / "d") == all_bytes(tmp_path / "one")


def test_the_log_of_a_rank_says_whether_all_is_there(tmp_path: Path, source: Path) -> None:
    done = halfbyte("convert", source, tmp_path / "d", "--rank", 0, "--world-size", 2, "--json-log")
    last = json.loads(done.output.splitlines()[-1])
    assert (last["event"], last["complete"], last["shards_missing"]) == ("finished", False, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size", "2"], "--world-size belongs to --rank"),
        (["--rank", "2", "--world-size", "2"], "--rank 2: ranks of 2 processes are 0 to 1"),
        (["--rank", "0"], "--rank 0 needs --world-size N"),
        (["--rank", "auto"], "--rank auto finds none of RANK"),
        (["--rank", "0", "--world-size", "2", "--overwrite"], "--overwrite does not go with --rank"),
        (["--rank", "0", "--world-size", "2", "--engine", "ray"], "--engine ray does not go with --rank"),
        (["--rank", "0", "--world-size", "2", "--check-load", "transformers"], "--check-load does not go with --rank"),
        (["--engine", "dask"], "unknown --engine 'dask'; known: local, ray"),
        (["--address", "auto"], "--address belongs to --engine ray"),
        (["--num-gpus-per-task", "1"], "--num-gpus-per-task belongs to --engine ray"),
        (["--engine", "ray", "--num-gpus-per-task", "1.5"], "a fraction of one GPU, or a whole number"),
        (["--engine", "ray", "--device", "cuda"], "needs --num-gpus-per-task, such as 1 or 0.5"),
        (["--engine", "ray", "--device", "cuda:0"], "Ray chooses the GPUs"),
        (["--engine", "ray", "--device", "cpu", "--num-gpus-per-task", "1"], "--device cpu does not go with"),
    ],
)
def test_refusals(tmp_path: Path, source: Path, options: list[str], message: str) -> None:
    done = halfbyte("convert", source, tmp_path / "d", *options)
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "d").exists()


def test_a_dry_run_of_a_rank_names_what_ranks_can_do(tmp_path: Path, source: Path) -> None:
    run(plan_of(source), tmp_path / "d", ONE)
    options = "convert", source, tmp_path / "d", "--dry-run", "--to", "mxfp4"
    for rank, overwrite in (((), True), (("--rank", 0, "--world-size", 2), False)):
        done = halfbyte(*options, *rank)
        text = " ".join(done.output.split())
        assert (done.exit_code, "--overwrite to replace it" in text) == (2, overwrite)
        assert ("stop every rank, delete" in text) is not overwrite


def test_without_ray_the_way_to_it_is_said(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    done = halfbyte("convert", source, tmp_path / "d", "--engine", "ray")
    assert (done.exit_code, "--engine ray needs Ray; install halfbyte[ray]" in done.output) == (2, True)
