"""Files that have a name in a checkpoint and are not there: Git LFS pointers, and links to nothing."""

from __future__ import annotations

import os
from pathlib import Path

from halfbyte.errors import CheckpointError

POINTER = b"version https://git-lfs.github.com/spec/"
"""How every Git LFS pointer begins."""
LARGEST = 1024
"""Bytes: a pointer is shorter."""


def is_lfs_pointer(path: Path) -> bool:
    """Whether a file is the small text that stands where Git LFS did not fetch a file."""
    try:
        if path.stat().st_size >= LARGEST:
            return False
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except OSError:
        return False


def is_dangling(path: Path) -> bool:
    """Whether a name is a link to nothing."""
    return path.is_symlink() and not path.exists()


def refuse_absent(path: Path) -> None:
    """Raise for a file that is needed and is a pointer or a link to nothing."""
    if is_dangling(path):
        raise CheckpointError(
            f"{path} is a link to {os.readlink(path)}, which is not there; fetch the file again, or remove the link"
        )
    if is_lfs_pointer(path):
        raise CheckpointError(f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {path.parent}")
