"""docs/scale.md: its scripts parse, their options exist, and its tables are what the simulation gives."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from benchmarks import scale_sim
from benchmarks.scale_sim import Machine, makespan
from halfbyte.cli import app
from tests.checkpoint.execute.scenes import plan_of, small_source

PAGE = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_shells_parse_the_scripts() -> None:
    scripts = blocks("bash")
    assert len(scripts) == 3
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_every_option_exists() -> None:
    lines = re.findall(r"halfbyte (convert|verify|finish|calibrate) ([^#`\n\"]*)", PAGE.replace("\\\n", " "))
    assert len(lines) >= 9
    commands = getattr(get_command(app), "commands")  # noqa: B009
    for command, rest in lines:
        known = {name for option in commands[command].params for name in option.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= known, (command, rest)


def test_the_kubernetes_job_is_an_indexed_one() -> None:
    (text,) = blocks("yaml")
    job = yaml.safe_load(text)
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert job["spec"]["completionMode"] == "Indexed"
    assert command[command.index("--world-size") + 1] == str(job["spec"]["completions"])


def test_the_tables_are_current() -> None:
    for line in scale_sim.tables().splitlines():
        assert line in PAGE, "run `python -m benchmarks.scale_sim --tables`"


@pytest.mark.parametrize("dealt", [False, True])
def test_the_simulation_by_hand(dealt: bool) -> None:
    assert makespan([2, 2, 2, 2], Machine([1, 1]), dealt) == pytest.approx(4)
    assert makespan([3, 2, 2], Machine([1, 1], start=1), dealt) == pytest.approx(5)
    assert makespan([1] * 8, Machine([1] * 4, cores=2), dealt) == pytest.approx(4)
    both = 1 + scale_sim.OUTPUT
    assert makespan([1, 1], Machine([10, 10], storage=both), dealt) == pytest.approx(2)
    slow = makespan([1] * 8, Machine([0.25, 1, 1, 1]), dealt)
    assert slow == pytest.approx(8 if dealt else 4)


def test_the_simulation_deals_as_ranks_do(tmp_path: Path) -> None:
    """The load of the fullest rank, for a real plan."""
    from halfbyte.checkpoint.execute.pool import shard_bytes
    from halfbyte.checkpoint.execute.ranks import Rank, share_of

    plan = plan_of(small_source(tmp_path, shards=7))
    sizes = [shard_bytes(shard) for shard in plan.shards]
    loads = [sum(map(shard_bytes, share_of(plan, Rank(number, 3)))) for number in range(3)]
    assert makespan(sizes, Machine([1, 1, 1]), dealt=True) == pytest.approx(max(loads))
