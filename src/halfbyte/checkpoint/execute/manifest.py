"""The manifest of a finished conversion: what was done, from which files, and a hash of each output tensor.

Hashes are taken while a tensor is written. So a tensor can be checked alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfbyte.checkpoint.execute.ending import Ending
from halfbyte.checkpoint.execute.hashes import TREE
from halfbyte.checkpoint.execute.journal import Finished
from halfbyte.checkpoint.io.index import MANIFEST, read_json
from halfbyte.checkpoint.plan.types import VERSION, Plan


def manifest_of(plan: Plan | Ending, finished: dict[str, Finished]) -> dict[str, Any]:
    """The manifest as JSON, once every shard is complete."""
    return {
        "halfbyte": VERSION,
        "fingerprint": plan.fingerprint,
        **plan.choices,
        "source": [{"name": file.name, "size": file.size, "header": file.header} for file in plan.files],
        "files": sorted([*plan.json_files, *plan.side_files]),
        "hash": TREE,
        "shards": {shard.name: {"size": shard.size, "tensors": finished[shard.name].tensors} for shard in plan.shards},
        "changed_blocks": {
            module: count for shard in plan.shards for module, count in finished[shard.name].changed_blocks.items()
        },
        "kept": dict(plan.kept),
        "dropped": dict(plan.dropped),
        "shared_scales": [list(group) for group in plan.shared],
    }


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a finished conversion in that directory, if there is one."""
    if not (path / MANIFEST).is_file():
        return None
    manifest = read_json(path / MANIFEST)
    return manifest if "fingerprint" in manifest and isinstance(manifest.get("shards"), dict) else None
