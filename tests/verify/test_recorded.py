"""Hashes of the manifest: those of today and those of older versions are checked, others are named."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from halfbyte.checkpoint import Options, Resources, make_plan, run
from halfbyte.checkpoint.execute.hashes import PLAIN
from halfbyte.checkpoint.io.index import MANIFEST, open_checkpoint
from halfbyte.verify.recorded import recorded_problems
from tests.checkpoint.toy import llama, read_checkpoint, write_checkpoint


@pytest.fixture
def converted(tmp_path: Path) -> Path:
    source = write_checkpoint(tmp_path / "s", llama(), shards=2)
    run(make_plan(source, Options(method="amax")), tmp_path / "d", Resources(workers=2, max_memory=1 << 28, sync=False))
    return tmp_path / "d"


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
def test_a_changed_bit_is_found(converted: Path, old: bool) -> None:
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
