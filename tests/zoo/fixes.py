"""What the rules of `shrink` miss, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECTIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}

ARGUMENTS: Mapping[str, Mapping[str, Any]] = {}
"""What a config needs where its defaults are not enough to make one."""

FIXES: Mapping[str, Mapping[str, Any]] = {}
"""Dotted name of a setting → its value, after the rules."""


def repair(config: Any) -> Any:
    """The same config with the fixes of its model type."""
    for path, value in FIXES.get(config.model_type, {}).items():
        *way, name = path.split(".")
        part = config
        for step in way:
            part = getattr(part, step)
        setattr(part, name, value)
    return config
