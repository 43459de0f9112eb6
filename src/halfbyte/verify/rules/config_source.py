"""config.json against that of the source: a conversion changes how weights are stored, not what the model is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from halfbyte.checkpoint.io.index import CONFIG, Checkpoint
from halfbyte.verify.problems import Problem

MAY_DIFFER = ("quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path", "expert_dtype")
"""Keys that a conversion writes, and notes of who wrote the file."""


def config_problems(checkpoint: Checkpoint, source: Checkpoint) -> Iterator[Problem]:
    """Settings of the model that differ, by their dotted names."""
    for name, (mine, theirs) in sorted(_differences(checkpoint.config, source.config).items()):
        text = f"{name} is {_short(mine)}, but {_short(theirs)} in the source: another model, or an edited one"
        yield Problem("warning", "config", CONFIG, text)


def _differences(mine: Mapping[str, Any], theirs: Mapping[str, Any], before: str = "") -> dict[str, tuple[Any, Any]]:
    found: dict[str, tuple[Any, Any]] = {}
    for key in {*mine, *theirs} - set(MAY_DIFFER):
        a, b = mine.get(key), theirs.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            found |= _differences(a, b, f"{before}{key}.")
        elif a != b:
            found[before + key] = (a, b)
    return found


def _short(value: Any) -> str:
    text = "absent" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
