"""The error for what a conversion cannot go on from, and what each kind of run can do about it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from halfbyte.errors import CheckpointError


class ReplaceError(CheckpointError):
    """What is in the destination can only be replaced. A run of one process does that with --overwrite."""

    def __init__(self, fact: str, way_out: str) -> None:
        super().__init__(fact, way_out)
        self.fact, self.way_out = fact, way_out

    def __str__(self) -> str:
        return f"{self.fact}{self.way_out}"


@contextmanager
def without_overwrite(destination: Path) -> Iterator[None]:
    """Say what can be done where there is no --overwrite: with --rank, and in `halfbyte finish`."""
    try:
        yield
    except ReplaceError as error:
        raise CheckpointError(
            f"{error.fact}. Ranks cannot replace files: all of them need the same options and the same source. To "
            f"begin anew, stop every rank, delete {destination} and start them again, or give all of them another "
            "directory"
        ) from error
