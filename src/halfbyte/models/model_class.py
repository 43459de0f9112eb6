"""The class that a checkpoint's config.json names, as transformers has it. Called in a child process.

A class that comes as code beside the config (`auto_map`) is imported only where the caller trusts that code.
"""

from __future__ import annotations

import importlib.util
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from halfbyte.errors import ModelCodeError

AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForSeq2SeqLM", "AutoModel")
"""Where a config without `architectures` is looked up, in this order."""


def need(*packages: str) -> None:
    """Raise if a package is not installed. Nothing is imported."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            name = package.replace("_", "-")
            raise ModelCodeError(f"{name} is not installed; install it with: pip install 'halfbyte[transformers]'")


def find_class(path: Path, trust_remote_code: bool) -> tuple[Any, Any]:
    """(class, config object) of the model in a directory."""
    import transformers

    said = json.loads((path / "config.json").read_text(encoding="utf-8"))
    names = [str(name) for name in said.get("architectures") or ()]
    own = next((found for name in names if (found := getattr(transformers, name, None)) is not None), None)
    code = said.get("auto_map") or {}
    if own is None and code:
        return _from_code(path, names, code, trust_remote_code)
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    if own is None:
        if names:
            raise ModelCodeError(
                f"transformers {version('transformers')} has no class {names[0]}, which config.json names in "
                "architectures, and no code of its own lies beside it"
            )
        own = _by_config(config)
    return own, config


def _by_config(config: Any) -> Any:
    """The class for a config that names none."""
    import transformers

    for name in AUTO_CLASSES:
        mapping = getattr(transformers, name)._model_mapping
        if type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    raise ModelCodeError(
        f"config.json names no architectures, and transformers has no model for model_type {config.model_type!r}"
    )


def _from_code(path: Path, names: list[str], code: dict[str, str], trust_remote_code: bool) -> tuple[Any, Any]:
    """A class whose code lies beside the config."""
    import transformers
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    models = {auto: place for auto, place in code.items() if auto.startswith("AutoModel")}
    named = [place for place in models.values() if place.rpartition(".")[2] in names]
    usual = [models[auto] for auto in AUTO_CLASSES if auto in models]
    places = [*named, *usual, *models.values()]
    if not places:
        raise ModelCodeError("config.json has an auto_map, but no model class in it")
    if not trust_remote_code:
        raise ModelCodeError(
            f"the class {places[0].rpartition('.')[2]} comes as code with the checkpoint ({places[0]}); "
            "read that code and pass --trust-remote-code to run it"
        )
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True, local_files_only=True)
    return get_class_from_dynamic_module(places[0], str(path), local_files_only=True), config
