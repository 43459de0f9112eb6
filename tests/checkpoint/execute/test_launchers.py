"""Which rank a process is, from what launchers set."""

from __future__ import annotations

import pytest

from halfbyte.checkpoint.execute.launchers import resolve_rank
from halfbyte.checkpoint.execute.ranks import Rank
from halfbyte.errors import InputError

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
KUBERNETES = {"JOB_COMPLETION_INDEX": "5"}
SRUN = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4"}
ARRAY = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_ARRAY_TASK_ID": "6",
    "SLURM_ARRAY_TASK_MIN": "0",
    "SLURM_ARRAY_TASK_MAX": "7",
    "SLURM_ARRAY_TASK_COUNT": "8",
}
REPEATED = {**ARRAY, "SLURM_ARRAY_TASK_MIN": "3", "SLURM_ARRAY_TASK_MAX": "6", "SLURM_ARRAY_TASK_COUNT": "2"}


@pytest.mark.parametrize(
    ("environment", "world", "rank"),
    [
        (TORCHRUN, None, Rank(3, 8)),
        (TORCHRUN, 8, Rank(3, 8)),
        ({**TORCHRUN, **SRUN}, None, Rank(3, 8)),
        (KUBERNETES, 16, Rank(5, 16)),
        (SRUN, None, Rank(2, 4)),
        (ARRAY, None, Rank(6, 8)),
        (ARRAY, 64, Rank(6, 64)),
        (REPEATED, 8, Rank(6, 8)),
        ({**ARRAY, **SRUN}, None, Rank(2, 4)),
    ],
)
def test_what_launchers_say(environment: dict[str, str], world: int | None, rank: Rank) -> None:
    assert resolve_rank("auto", world, environment)[0] == rank


def test_numbers_are_taken_as_they_are() -> None:
    assert resolve_rank("1", 2, TORCHRUN)[0] == Rank(1, 2)


@pytest.mark.parametrize(
    ("rank", "world", "environment", "message"),
    [
        ("auto", None, {}, "--rank auto finds none of RANK and WORLD_SIZE"),
        ("auto", None, KUBERNETES, "JOB_COMPLETION_INDEX, which does not say how many there are; add --world-size"),
        ("auto", None, REPEATED, "SLURM_ARRAY_TASK_ID, which does not say how many"),
        ("auto", 9, TORCHRUN, "--world-size 9, but WORLD_SIZE says 8"),
        ("auto", None, {"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x', which is no number"),
        ("auto", None, {"RANK": "2", "WORLD_SIZE": "2"}, "ranks of 2 processes are 0 to 1"),
        ("two", 3, {}, "--rank 'two' is neither a number nor auto"),
        ("1", None, TORCHRUN, "--rank 1 needs --world-size N"),
    ],
)
def test_refusals(rank: str, world: int | None, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_rank(rank, world, environment)


@pytest.mark.parametrize(
    ("environment", "world", "rank", "found"),
    [
        (TORCHRUN, None, Rank(3, 8), "WORLD_SIZE"),
        (KUBERNETES, 16, Rank(5, 16), "JOB_COMPLETION_INDEX"),
        (SRUN, None, Rank(2, 4), "SLURM_NTASKS"),
        (ARRAY, None, Rank(6, 8), "SLURM_ARRAY_TASK_COUNT"),
        (REPEATED, 8, Rank(6, 8), "SLURM_ARRAY_TASK_ID"),
        ({**TORCHRUN, **KUBERNETES, **SRUN, **ARRAY}, None, Rank(3, 8), "WORLD_SIZE"),
        ({"RANK": "3", **KUBERNETES, **ARRAY}, 16, Rank(5, 16), "JOB_COMPLETION_INDEX"),
        ({"WORLD_SIZE": "3", **SRUN}, None, Rank(2, 4), "SLURM_NTASKS"),
        ({key: ARRAY[key] for key in ARRAY if key != "SLURM_NTASKS"}, None, Rank(6, 8), "SLURM_ARRAY_TASK_COUNT"),
        # an array that does not begin at 0, whose count is not its end, of one task, or of which less is said
        ({**ARRAY, "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_MAX": "7"}, 8, Rank(6, 8), "SLURM_ARRAY_TASK_ID"),
        ({**ARRAY, "SLURM_ARRAY_TASK_COUNT": "7"}, 8, Rank(6, 8), "SLURM_ARRAY_TASK_ID"),
        ({**ARRAY, "SLURM_ARRAY_TASK_MAX": ""}, 8, Rank(6, 8), "SLURM_ARRAY_TASK_ID"),
        (
            {**ARRAY, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_TASK_MAX": "0", "SLURM_ARRAY_TASK_COUNT": "1"},
            8, Rank(0, 8), "SLURM_ARRAY_TASK_ID",
        ),
        (
            {**ARRAY, "SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MAX": "1", "SLURM_ARRAY_TASK_COUNT": "2"},
            None, Rank(1, 2), "SLURM_ARRAY_TASK_COUNT",
        ),
    ],
)  # fmt: skip
def test_where_a_rank_was_found(environment: dict[str, str], world: int | None, rank: Rank, found: str) -> None:
    assert resolve_rank("auto", world, environment) == (rank, found)
    assert resolve_rank("0", 3, environment) == (Rank(0, 3), "")


NONE = (
    "--rank auto finds none of RANK and WORLD_SIZE (torchrun), JOB_COMPLETION_INDEX (Kubernetes), SLURM_ARRAY_TASK_ID, "
    "SLURM_PROCID; give --rank R --world-size N"
)


@pytest.mark.parametrize(
    ("rank", "world", "environment", "message"),
    [
        ("auto", 3, {}, NONE),
        ("auto", 3, {"RANK": "1"}, NONE),
        ("auto", 3, {"SLURM_PROCID": "1"}, NONE),
        (
            "auto", None, KUBERNETES,
            "--rank auto finds JOB_COMPLETION_INDEX, which does not say how many there are; add --world-size N",
        ),
        ("auto", 9, TORCHRUN, "--world-size 9, but WORLD_SIZE says 8; leave --world-size out"),
        ("auto", 9, SRUN, "--world-size 9, but SLURM_NTASKS says 4; leave --world-size out"),
        (
            "auto", 2, {"RANK": "0", "WORLD_SIZE": "-2"},
            "WORLD_SIZE is '-2', which is no number; give --rank R --world-size N",
        ),
        ("-1", 3, {}, "--rank '-1' is neither a number nor auto"),
        ("1", None, TORCHRUN, "--rank 1 needs --world-size N, the number of processes"),
        ("auto", 0, KUBERNETES, "--world-size 0: it counts the processes, so it is 1 or more"),
        ("auto", 0, ARRAY, "--world-size 0: it counts the processes, so it is 1 or more"),
        ("auto", 0, TORCHRUN, "--world-size 0, but WORLD_SIZE says 8; leave --world-size out"),
        ("auto", None, {"RANK": "0", "WORLD_SIZE": "0"}, "--world-size 0: it counts the processes, so it is 1 or more"),
    ],
)  # fmt: skip
def test_whole_refusals(rank: str, world: int | None, environment: dict[str, str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve_rank(rank, world, environment)
    assert str(caught.value) == message
