"""What config.json says of the language model in it: at the top, or in a part of its own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

TEXT_PARTS = ("text_config", "llm_config", "language_config")
"""What the part for the language model is called: by transformers, by InternVL's own code, by DeepSeek-VL's."""


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config that describes the language model alone; {} where there is none.

    >>> text_part({"model_type": "internvl_chat", "llm_config": {"model_type": "qwen2"}})
    {'model_type': 'qwen2'}
    """
    return next(text_parts(config), {})


def text_parts(config: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All such parts that a config has."""
    return (part for part in map(config.get, TEXT_PARTS) if isinstance(part, dict))


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A value of config.json, or of its part for the language model."""
    return config[name] if name in config else text_part(config).get(name)
