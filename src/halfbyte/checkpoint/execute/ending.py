"""What the last steps of a conversion need of its plan: names, sizes, and the contents of JSON files.

It can be kept in a file. So a process that has no plan, and reads no header, can close a conversion.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from halfbyte.checkpoint.execute.disk import Disk
from halfbyte.checkpoint.plan.types import VERSION, Plan, SourceFile
from halfbyte.errors import CheckpointError

ENDING = "ending.json"
"""Its file in the work folder."""


@dataclass(frozen=True)
class ShardFile:
    """An output file, without what it holds."""

    name: str
    size: int


@dataclass(frozen=True)
class Ending:
    """The part of a plan that `close` uses. Its attributes are named as those of Plan."""

    source: Path
    fingerprint: str
    choices: Mapping[str, str]
    files: tuple[SourceFile, ...]
    side_files: tuple[str, ...]
    json_files: Mapping[str, Mapping[str, Any]]
    shards: tuple[ShardFile, ...]
    kept: Mapping[str, str]
    dropped: Mapping[str, str]
    shared: list[tuple[str, ...]]

    @classmethod
    def of(cls, plan: Plan) -> Ending:
        return cls(
            source=plan.source.absolute(),
            fingerprint=plan.fingerprint,
            choices=plan.choices,
            files=plan.files,
            side_files=plan.side_files,
            json_files=plan.json_files,
            shards=tuple(ShardFile(shard.name, shard.size) for shard in plan.shards),
            kept=plan.kept,
            dropped=plan.dropped,
            shared=plan.shared,
        )

    def write(self, work: Path, disk: Disk) -> None:
        """Keep it in the work folder."""
        content = {"version": VERSION, **asdict(self), "source": str(self.source)}
        disk.write(work / ENDING, json.dumps(content).encode(), through=work / f"{ENDING}.new")

    @classmethod
    def read(cls, work: Path) -> Ending | None:
        """What a work folder keeps; None if there is none, or one of another version."""
        path = work / ENDING
        try:
            content = json.loads(path.read_text())
            if content.pop("version") != VERSION:
                return None
            return cls(
                source=Path(content.pop("source")),
                files=tuple(SourceFile(**file) for file in content.pop("files")),
                side_files=tuple(content.pop("side_files")),
                shards=tuple(ShardFile(**shard) for shard in content.pop("shards")),
                shared=[tuple(group) for group in content.pop("shared")],
                **content,
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}; run the convert command again") from error
