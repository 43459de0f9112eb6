"""Hashes of the manifest: those of today and those of older versions are checked, others are named."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.hashes import PLAIN
from halfbyte.checkpoint.io.index import MANIFEST, open_checkpoint
from halfbyte.errors import CheckpointError
from halfbyte.verify import recorded
from halfbyte.verify.recorded import recorded_problems
from tests import tiny_models
from tests.checkpoint.toy import llama, read_checkpoint, write_checkpoint
from tests.samples import f32
from tests.tiny_models import Tensors
from tests.verify.headers import lines


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    run(make_plan(source, Options(method="amax")), tmp_path / "d", Resources(workers=2, max_memory=1 << 28, sync=False))
    return tmp_path / "d"


def made_by_hand(folder: Path, **recorded: object) -> Path:
    """Three tensors of 4 to 12 bytes, and what the manifest says of them."""
    tensors: Tensors = {"a": f32(1), "b": f32(1, 2), "c": f32(1, 2, 3)}
    plain = {name: hashlib.sha256(x.tobytes()).hexdigest()[:32] for name, x in tensors.items()}
    path = tiny_models.write_checkpoint(folder, tensors, {}, shards=1)
    shards = {"model.safetensors": {"tensors": plain | recorded}, "other": {"tensors": []}, "third": 3}
    (path / MANIFEST).write_text(json.dumps({"fingerprint": "", "hash": PLAIN, "shards": shards}))
    return path


@pytest.mark.parametrize("headers_only", [True, False])
@pytest.mark.parametrize("chunk", [1, 1 << 21])
def test_every_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int, headers_only: bool) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", chunk)
    path = made_by_hand(tmp_path, gone="0", earlier="1", b="123456789abc")
    manifest = json.loads((path / MANIFEST).read_text())
    del manifest["shards"]["model.safetensors"]["tensors"]["a"]
    (path / MANIFEST).write_text(json.dumps(manifest))
    digest = hashlib.sha256(f32(1, 2).tobytes()).hexdigest()[:8]
    bytes_differ = f"error [manifest] b: its bytes are not those that were written: SHA-256 {digest}…, not 12345678…"
    order = []

    def each(check: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            order.append(item.name)
            yield check(item)

    found = lines(recorded_problems(open_checkpoint(path), headers_only, each))
    assert found == [
        f"error [manifest] {MANIFEST}: says nothing of the tensors in other",
        f"error [manifest] {MANIFEST}: says nothing of the tensors in third",
        f"error [manifest] earlier: named by {MANIFEST}, but not there",
        f"error [manifest] gone: named by {MANIFEST}, but not there",
        f"error [manifest] a: not named by {MANIFEST}: it was added after the conversion",
        *([] if headers_only else [bytes_differ]),
    ]
    assert order == ([] if headers_only else ["c", "b"])  # the largest first
    (path / MANIFEST).unlink()
    assert lines(recorded_problems(open_checkpoint(path), headers_only, each)) == []


def problems(folder: Path) -> list[str]:
    return [f"{problem.name}: {problem.text}" for problem in recorded_problems(open_checkpoint(folder), False)]


def rewrite(folder: Path, **changes: object) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def flip(folder: Path) -> None:
    """Change one bit of the last tensor of the first shard."""
    path = min(folder.glob("*.safetensors"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def make_old(folder: Path) -> None:
    """The manifest as versions before the tree wrote it."""
    plain = {name: hashlib.sha256(x.tobytes()).hexdigest()[:32] for name, x in read_checkpoint(folder).items()}
    shards = json.loads((folder / MANIFEST).read_text())["shards"]
    for shard in shards.values():
        shard["tensors"] = {name: plain[name] for name in shard["tensors"]}
    rewrite(folder, hash=PLAIN, shards=shards)


@pytest.mark.parametrize("old", [False, True])
def test_a_changed_bit_is_found(converted: Path, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfbyte.verify.values.CHUNK", 1 << 10)  # some tensors come in several pieces
    if old:
        make_old(converted)
    assert problems(converted) == []
    flip(converted)
    (found,) = problems(converted)
    assert "its bytes are not those that were written" in found


def test_the_old_name_of_the_hash_is_what_old_versions_wrote() -> None:
    assert PLAIN == "sha256, first 32 hex digits, of each tensor's bytes"


def test_a_hash_of_a_later_version_is_named(converted: Path) -> None:
    rewrite(converted, hash="blake9")
    (found,) = problems(converted)
    assert "cannot check: blake9" in found


def test_a_file_that_is_cut_while_it_is_checked(converted: Path) -> None:
    checkpoint = open_checkpoint(converted)
    (file,) = {tensor.file for tensor in checkpoint.tensors.values() if tensor.name.endswith("0.mlp.down_proj.weight")}
    os.truncate(converted / file, (converted / file).stat().st_size - 1)
    with pytest.raises(CheckpointError, match=f"{file} was cut while it was checked: .* ends behind its end"):
        list(recorded_problems(checkpoint, headers_only=False))
    (converted / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file} cannot be read after byte \d+: No such file or directory"):
        list(recorded_problems(checkpoint, headers_only=False))


def test_a_disk_that_cannot_read(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file and the place. A mapped file would end the process."""
    checkpoint, real = open_checkpoint(converted), os.preadv
    tensor = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]

    def preadv(file: int, buffers: Sequence[memoryview], offset: int) -> int:
        if offset == tensor.info.start and os.readlink(f"/proc/self/fd/{file}").endswith(tensor.file):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError) as caught:
        list(recorded_problems(checkpoint, headers_only=False))
    place = f"{converted / tensor.file} cannot be read after byte {tensor.info.start}"
    assert str(caught.value) == f"{place}: Input/output error"
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_of_several_parts(converted: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "PART", 777)
    monkeypatch.setattr(recorded, "_kept", threading.local())
    checkpoint = open_checkpoint(converted)
    assert list(recorded_problems(checkpoint, headers_only=False)) == []
    tensor = checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    assert tensor.info.bytes > 2 * 777
    with (converted / tensor.file).open("r+b") as file:
        file.seek(tensor.info.stop - 1)
        last = file.read(1)
        file.seek(tensor.info.stop - 1)
        file.write(bytes([last[0] ^ 1]))
    (problem,) = recorded_problems(checkpoint, headers_only=False)
    assert problem.name == tensor.name
