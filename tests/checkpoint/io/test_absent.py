"""Git LFS pointers and links to nothing, told from files that only look like them."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfbyte.checkpoint.io.absent import LARGEST, POINTER, is_dangling, is_lfs_pointer, refuse_absent
from halfbyte.errors import CheckpointError


@pytest.mark.parametrize(
    ("data", "pointer"),
    [
        (POINTER, True),
        (POINTER.ljust(LARGEST - 1), True),
        (POINTER.ljust(LARGEST), False),
        (POINTER[:-1], False),
        (b" " + POINTER, False),
        (b"", False),
    ],
)
def test_a_pointer_is_short_and_begins_like_one(tmp_path: Path, data: bytes, pointer: bool) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    assert LARGEST == 1024
    assert is_lfs_pointer(path) is pointer
    if not pointer:
        refuse_absent(path)
        return
    with pytest.raises(CheckpointError) as caught:
        refuse_absent(path)
    assert str(caught.value) == f"{path} is a Git LFS pointer, not the file itself: run `git lfs pull` in {tmp_path}"


def test_links(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "good").symlink_to("file")
    (tmp_path / "bad").symlink_to("../gone")
    assert [is_dangling(tmp_path / name) for name in ("file", "good", "bad", "none")] == [False, False, True, False]
    assert not is_lfs_pointer(tmp_path / "bad")
    refuse_absent(tmp_path / "good")
    refuse_absent(tmp_path / "none")  # whoever opens it says so
    with pytest.raises(CheckpointError) as caught:
        refuse_absent(tmp_path / "bad")
    assert str(caught.value) == (
        f"{tmp_path}/bad is a link to ../gone, which is not there; fetch the file again, or remove the link"
    )
