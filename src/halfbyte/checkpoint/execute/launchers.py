"""Which rank a process is, from the environment that its launcher gives it: torchrun, Kubernetes, Slurm."""

from __future__ import annotations

from collections.abc import Mapping

from halfbyte.checkpoint.execute.ranks import Rank
from halfbyte.errors import InputError

SOURCES = "RANK and WORLD_SIZE (torchrun), JOB_COMPLETION_INDEX (Kubernetes), SLURM_ARRAY_TASK_ID, SLURM_PROCID"
AUTO = "auto"
ARRAY_COUNT = "SLURM_ARRAY_TASK_COUNT"


def resolve_rank(rank: str, world_size: int | None, environment: Mapping[str, str]) -> tuple[Rank, str]:
    """The rank, and where it was found, for people.

    rank: a number, or "auto": from the environment. world_size: None takes what the launcher says. One that is given
    must agree with it, except for arrays: a part of an array may be run again.
    """
    if rank != AUTO:
        if not rank.isdecimal():
            raise InputError(f"--rank {rank!r} is neither a number nor auto")
        if world_size is None:
            raise InputError(f"--rank {rank} needs --world-size N, the number of processes")
        return Rank(int(rank), world_size), ""
    number, size, name = _found(environment)
    count = size if world_size is None else world_size
    if count is None:
        raise InputError(f"--rank auto finds {name}, which does not say how many there are; add --world-size N")
    if size is not None and count != size and name != ARRAY_COUNT:
        raise InputError(f"--world-size {world_size}, but {name} says {size}; leave --world-size out")
    return Rank(number, count), name


def _found(environment: Mapping[str, str]) -> tuple[int, int | None, str]:
    """The number, how many there are if that is known, and the variable. The innermost launcher comes first."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        return _number(environment, "RANK"), _number(environment, "WORLD_SIZE"), "WORLD_SIZE"
    if "JOB_COMPLETION_INDEX" in environment:
        return _number(environment, "JOB_COMPLETION_INDEX"), None, "JOB_COMPLETION_INDEX"
    if "SLURM_ARRAY_TASK_ID" in environment and environment.get("SLURM_NTASKS", "1") == "1":
        return _array(environment)
    if "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment:
        return _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NTASKS"), "SLURM_NTASKS"
    raise InputError(f"--rank auto finds none of {SOURCES}; give --rank R --world-size N")


def _array(environment: Mapping[str, str]) -> tuple[int, int | None, str]:
    """A task of a Slurm array. The count is trusted only if the array is whole: `--array=3,7` repeats two of many."""
    name = "SLURM_ARRAY_TASK_ID"
    bounds = [environment.get(f"SLURM_ARRAY_TASK_{part}", "") for part in ("MIN", "MAX", "COUNT")]
    if all(bound.isdecimal() for bound in bounds):
        low, high, count = map(int, bounds)
        if low == 0 and count == high + 1 and count > 1:
            return _number(environment, name), count, ARRAY_COUNT
    return _number(environment, name), None, name


def _number(environment: Mapping[str, str], name: str) -> int:
    if not environment[name].isdecimal():
        raise InputError(f"{name} is {environment[name]!r}, which is no number; give --rank R --world-size N")
    return int(environment[name])
