"""The layer under all changes of the disk: what each operation asks of the system."""

from __future__ import annotations

import ast
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from halfbyte.checkpoint.execute import disk as module
from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.locks import FileLock
from halfbyte.checkpoint.execute.pool import check_unchanged, shard_bytes
from halfbyte.checkpoint.execute.writer import disk_error
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.plan.types import SourceFile
from halfbyte.errors import CheckpointError


@pytest.fixture
def flushed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of what was flushed."""
    names: list[str] = []

    def fsync(descriptor: int) -> None:
        names.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    monkeypatch.setattr(os, "fsync", fsync)
    return names


def test_flushes_reach_the_system(tmp_path: Path, flushed: list[str]) -> None:
    file = Disk().create(tmp_path / "file")
    Disk().flush(file)
    Disk().flush_folder(tmp_path)
    Disk(sync=False).flush(file)
    Disk(sync=False).flush_folder(tmp_path)
    Disk().close(file)
    assert flushed == ["file", tmp_path.name]


def test_whole_files_are_flushed_under_another_name_first(tmp_path: Path, flushed: list[str]) -> None:
    (tmp_path / "final").mkdir()
    Disk().write(tmp_path / "final" / "a", b"new", through=tmp_path / "temporary")
    Disk().copy(tmp_path / "final" / "a", tmp_path / "final" / "b", through=tmp_path / "temporary")
    assert flushed == ["temporary", "final"] * 2
    assert {path.name: path.read_bytes() for path in (tmp_path / "final").iterdir()} == {"a": b"new", "b": b"new"}
    assert not (tmp_path / "temporary").exists()


def test_nothing_is_left_of_a_longer_file_that_a_kill_left(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"copied")
    (tmp_path / "temporary").write_bytes(bytes(100))
    Disk(sync=False).copy(tmp_path / "a", tmp_path / "b", through=tmp_path / "temporary")
    (tmp_path / "temporary").write_bytes(bytes(100))
    Disk(sync=False).write(tmp_path / "c", b"written", through=tmp_path / "temporary")
    assert (tmp_path / "b").read_bytes() == b"copied"
    assert (tmp_path / "c").read_bytes() == b"written"


def test_a_copy_has_the_mode_of_its_source(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    (tmp_path / "a").chmod(0o751)
    Disk(sync=False).copy(tmp_path / "a", tmp_path / "b", through=tmp_path / "c")
    assert (tmp_path / "b").stat().st_mode & 0o7777 == 0o751


def test_a_copy_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 7)
    (tmp_path / "a").write_bytes(bytes(range(100)))
    Disk(sync=False).copy(tmp_path / "a", tmp_path / "b", through=tmp_path / "c")
    assert (tmp_path / "b").read_bytes() == bytes(range(100))


def test_a_system_that_writes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pwrite may; Linux stops at 2 GiB."""
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, offset: pwrite(file, data[:3], offset))
    disk = Disk(sync=False)
    file = disk.create(tmp_path / "a")
    disk.write_at(file, b"0123456789", 2)
    disk.close(file)
    assert (tmp_path / "a").read_bytes() == b"\0\x000123456789"


def test_new_folders_are_flushed_into_those_above(tmp_path: Path, flushed: list[str]) -> None:
    Disk().make_folders(tmp_path / "a" / "b")
    Disk().make_folders(tmp_path / "a" / "b")
    assert flushed == [tmp_path.name, "a"]


def test_a_folder_that_another_process_makes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def make_folder(disk: Disk, path: Path) -> None:
        os.mkdir(path)
        os.mkdir(path)

    monkeypatch.setattr(Disk, "make_folder", make_folder)
    Disk().make_folders(tmp_path / "a")
    assert (tmp_path / "a").is_dir()


def test_a_tree_goes_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "x").write_text("x")
    (tmp_path / "tree" / "z").mkdir(parents=True)
    for name in ("a", "b", "z/c"):
        (tmp_path / "tree" / name).write_text("x")
    (tmp_path / "tree" / "link").symlink_to(tmp_path / "kept")
    Disk().remove_tree(tmp_path / "tree")
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept" / "x").exists()


def test_a_side_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"gone.txt cannot be read: No such file"):
        Disk().copy(tmp_path / "gone.txt", tmp_path / "b", through=tmp_path / "c")


def test_a_side_file_that_cannot_be_read_to_its_end_is_named(tmp_path: Path) -> None:
    """And not the disk that is written: the first page of this process is not there."""
    with pytest.raises(CheckpointError, match=r"^/proc/self/mem cannot be read: Input/output error$"):
        Disk(sync=False).copy(Path("/proc/self/mem"), tmp_path / "b", through=tmp_path / "c")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("change", ["longer", "shorter", "written again"])
def test_a_side_file_that_changes_while_it_is_copied(tmp_path: Path, change: str) -> None:
    source = tmp_path / "a"
    source.write_bytes(bytes(100))

    class Changing(Disk):
        def write_at(self, file: int, data: bytes | memoryview, offset: int) -> None:
            super().write_at(file, data, offset)
            if change == "written again":
                os.utime(source, ns=(0, 0))
            else:
                os.truncate(source, 150 if change == "longer" else 50)

    with pytest.raises(CheckpointError, match=r"a changed while it was copied; run the same command again"):
        Changing(sync=False).copy(source, tmp_path / "b", through=tmp_path / "c")
    assert not (tmp_path / "b").exists()


READING = {
    *("os.open", "os.close", "os.stat", "os.preadv", "os.access", "os.strerror", "os.path.lexists", "os.cpu_count"),
    *("os.sched_getaffinity", "shutil.disk_usage"),
}
"""Functions of os and shutil that change nothing, as os.open is used here: to read, and to create an empty lock."""
METHODS = {
    *("rename", "unlink", "mkdir", "rmdir", "write_bytes", "write_text", "touch", "chmod", "symlink_to", "hardlink_to"),
    "tofile",
}
"""Methods of paths and arrays that change a disk. `open` and `replace` have other meanings, too."""


def test_no_other_module_changes_the_disk() -> None:
    """Else the recorder of the tests would not see it. A Disk is called `disk` everywhere."""
    home = Path(module.__file__)
    found = []
    for path in sorted(home.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())) if path != home else ():
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            owner, _, name = called.rpartition(".")
            of_system = called.startswith(("os.", "shutil.")) and called not in READING
            to_write = name == "open" and any("w" in ast.unparse(given).lower() for given in node.args[-1:])
            if of_system or to_write or called == "open" or (name in METHODS and not owner.endswith("disk")):
                found.append(f"{path.name}: {ast.unparse(node)}")
    assert found == []


@pytest.mark.parametrize("sync", [False, True])
def test_no_file_stays_open(tmp_path: Path, sync: bool) -> None:
    """Nor a folder that was flushed."""
    (tmp_path / "source").write_bytes(b"some")
    disk = Disk(sync)
    before = len(os.listdir("/proc/self/fd"))
    disk.copy(tmp_path / "source", tmp_path / "copy", through=tmp_path / "begun")
    disk.write(tmp_path / "written", b"more", through=tmp_path / "begun")
    disk.flush_folder(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("number", "full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EFBIG, True), (errno.EIO, False)]
)
def test_what_is_said_when_writing_fails(number: int, full: bool) -> None:
    error, path = OSError(number, os.strerror(number)), Path("d/x")
    wanted = (
        f"no space left for d/x: {os.strerror(number)}. Finished shards are kept; make room and run the same command "
        "again"
        if full
        else "d/x cannot be written: Input/output error"
    )
    assert str(disk_error(error, path)) == wanted
    assert str(disk_error(OSError("odd"), path)) == "d/x cannot be written: odd"


def test_whether_source_files_changed(tmp_path: Path) -> None:
    """By size and time; only one of them if that is asked."""
    for name in "ab":
        (tmp_path / name).write_text("1234")
    stat = (tmp_path / "a").stat()
    other = (tmp_path / "b").stat()

    def plan(size: int = 4, modified: int = stat.st_mtime_ns) -> Any:
        files = (SourceFile("b", 4, other.st_mtime_ns, ""), SourceFile("a", size, modified, ""))
        return SimpleNamespace(source=tmp_path, files=files)

    check_unchanged(plan())
    for changed in (plan(size=5), plan(modified=stat.st_mtime_ns - 1)):
        check_unchanged(changed, "b")
        check_unchanged(changed, "of another plan")
        for asked in (None, "a"):
            with pytest.raises(CheckpointError) as caught:
                check_unchanged(changed, asked)
            assert str(caught.value) == f"{tmp_path / 'a'} changed while it was converted; begin anew with --overwrite"


def test_source_bytes_of_a_shard() -> None:
    copies = [SimpleNamespace(output=SimpleNamespace(bytes=size)) for size in (3, 4)]
    units = [SimpleNamespace(source_bytes=size) for size in (50, 60)]
    assert shard_bytes(SimpleNamespace(copies=copies, units=units)) == 117  # type: ignore[arg-type]
    assert shard_bytes(SimpleNamespace(copies=(), units=())) == 0  # type: ignore[arg-type]


def test_others_may_read_new_files_and_nobody_may_run_them(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Disk(sync=False).write(tmp_path / "a", b"", through=tmp_path / "b")
        with FileLock(tmp_path / "lock"):
            pass
        (tmp_path / "source").write_bytes(b"")
        (tmp_path / "source").chmod(0o600)
        Disk(sync=False).copy(tmp_path / "source", tmp_path / "copy", through=tmp_path / "b")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in tmp_path.iterdir()}
    assert modes == {"a": "0o644", "lock": "0o644", "source": "0o600", "copy": "0o600"}


def test_files_are_not_passed_on_to_programs_that_are_started(tmp_path: Path) -> None:
    disk = Disk(sync=False)
    files = Files({"f": str(tmp_path / "f")})
    opened = [disk.create(tmp_path / "f"), disk.reopen(tmp_path / "f"), files.descriptor("f")]
    assert [os.get_inheritable(file) for file in opened] == [False] * 3
    for file in opened[:2]:
        disk.close(file)
    files.close()
