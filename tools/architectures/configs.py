"""Configs to build architectures from: the default one of the class, and what the default lacks for some of them."""

from __future__ import annotations

from typing import Any

FULL_ROTARY = {"rope_type": "default", "rope_theta": 10000.0}

LACKS: dict[str, dict[str, Any]] = {
}
"""Class → settings without which the default config builds no model."""


def default_config(kind: Any) -> Any:
    """The config that a class is built from."""
    return kind.config_class(**LACKS.get(kind.__name__, {}))
