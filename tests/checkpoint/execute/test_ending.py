"""What is kept of a plan for its last steps, and the manifest that they write."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.execute.ending import ENDING, Ending, ShardFile
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.execute.manifest import manifest_of, read_manifest
from halfbyte.checkpoint.plan.types import VERSION
from halfbyte.errors import CheckpointError
from tests.checkpoint.execute.scenes import plan_of, small_source


def test_what_is_kept_of_a_plan(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "s"))
    ending = Ending.of(plan)
    assert ending.source == (tmp_path / "s").absolute()
    assert ending.shards == tuple(ShardFile(shard.name, shard.size) for shard in plan.shards)
    for name in ("fingerprint", "choices", "files", "side_files", "json_files", "kept", "dropped", "shared"):
        assert getattr(ending, name) == getattr(plan, name)
    assert Ending.read(tmp_path) is None
    ending.write(tmp_path, Disk(sync=False))
    assert Ending.read(tmp_path) == ending
    assert not (tmp_path / f"{ENDING}.new").exists()
    content = json.loads((tmp_path / ENDING).read_text())
    assert content["version"] == VERSION
    (tmp_path / ENDING).write_text(json.dumps(content | {"version": VERSION + 1}))
    assert Ending.read(tmp_path) is None


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}', '{"version": 1, "source": "x", "files": 3}'])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str) -> None:
    (tmp_path / ENDING).write_text(text)
    with pytest.raises(CheckpointError) as caught:
        Ending.read(tmp_path)
    found = str(caught.value)
    assert found.startswith(f"{tmp_path / ENDING} cannot be read: ")
    assert found.endswith("; run the convert command again")


def test_the_manifest(tmp_path: Path) -> None:
    plan = plan_of(small_source(tmp_path / "s", shards=2))
    one, two = (shard.name for shard in plan.shards)
    finished = {one: Finished(one, 5, {"a": "aa"}, {"m": 3}), two: Finished(two, 6, {"b": "bb"})}
    found = manifest_of(plan, finished)
    assert found == {
        "halfbyte": VERSION,
        "fingerprint": plan.fingerprint,
        **plan.choices,
        "source": [{"name": file.name, "size": file.size, "header": file.header} for file in plan.files],
        "files": sorted([*plan.json_files, *plan.side_files]),
        "hash": "sha256, first 32 hex digits, of the sha256 of every 16384 bytes of each tensor",
        "shards": {
            one: {"size": plan.shards[0].size, "tensors": {"a": "aa"}},
            two: {"size": plan.shards[1].size, "tensors": {"b": "bb"}},
        },
        "changed_blocks": {"m": 3},
        "kept": dict(plan.kept),
        "dropped": {},
        "shared_scales": [list(group) for group in plan.shared],
    }
    assert manifest_of(Ending.of(plan), finished) == found
    assert read_manifest(tmp_path) is None
    for content, known in ((found, True), ({"shards": {}}, False), ({"fingerprint": "x", "shards": []}, False)):
        (tmp_path / "halfbyte.json").write_text(json.dumps(content))
        assert read_manifest(tmp_path) == (content if known else None)
