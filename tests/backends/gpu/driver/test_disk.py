"""Compiled kernels on disk: found again, written whole or not at all, ignored when they are damaged."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

import pytest

from halfbyte.backends.gpu.driver import disk
from halfbyte.backends.gpu.driver.commands import Image

IMAGE = Image(b"\x7fELF\n\0code", "kernel", 128, 0, 10)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HALFBYTE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def never() -> Image:
    raise AssertionError("it was compiled again")


def test_what_was_made_once_is_found(cache: Path) -> None:
    assert not disk.is_cached(["a", 1])
    assert disk.cached(["a", 1], lambda: IMAGE) == IMAGE
    assert disk.cached(["a", 1], never) == IMAGE
    assert disk.is_cached(["a", 1])
    other = dataclasses.replace(IMAGE, shared=5)
    assert disk.cached(["a", 2], lambda: other) == other
    assert len(list((cache / "kernels").iterdir())) == 2


@pytest.mark.parametrize("what", ["cut", "other code", "other number", "no header", "empty", "another form"])
def test_damaged_files_are_written_again(cache: Path, what: str) -> None:
    disk.cached("a", lambda: IMAGE)
    (path,) = (cache / "kernels").iterdir()
    whole = path.read_bytes()
    damaged = {
        "cut": whole[:-1],
        "other code": whole[:-1] + b"E",
        "other number": whole.replace(b'"threads": 128', b'"threads": 256'),
        "no header": whole.replace(b"{", b"", 1),
        "empty": b"",
        "another form": whole.replace(b"kernel 1", b"kernel 0", 1),
    }[what]
    assert damaged != whole
    path.write_bytes(damaged)
    assert disk.cached("a", lambda: IMAGE) == IMAGE
    assert path.read_bytes() == whole


def test_processes_that_write_at_once_leave_one_whole_file(cache: Path) -> None:
    """Each writes under a name of its own. Nothing else stays in the folder."""
    threads = [threading.Thread(target=disk._write, args=(cache / "kernels" / "x.bin", IMAGE)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in (cache / "kernels").iterdir()] == ["x.bin"]
    assert disk._read(cache / "kernels" / "x.bin") == IMAGE


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file stands in the way")
    assert disk.cached("a", lambda: IMAGE) == IMAGE
    assert disk.cached("a", lambda: IMAGE) == IMAGE


def test_the_folder(monkeypatch: pytest.MonkeyPatch, cache: Path, tmp_path: Path) -> None:
    assert disk.folder() == cache
    monkeypatch.delenv("HALFBYTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert disk.folder() == tmp_path / "xdg" / "halfbyte"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert disk.folder() == tmp_path / "home" / ".cache" / "halfbyte"
