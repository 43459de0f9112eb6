"""Write src/halfbyte/models/architectures.json: what the modules of every transformers architecture are.

Every class of the auto mappings for language models is built on the meta device, from its default config and from those
that bring further modules, and described by `halfbyte.models.describe_model`. Run `python -m
tools.architectures.generate` after a new transformers is pinned; `--check` says whether the file is what this would
write.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import halfbyte.models
from halfbyte.models.describe_model import describe
from tools.architectures.configs import configs

TABLE = Path(halfbyte.models.__file__).with_name("architectures.json")

MAPPINGS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "SEQ_TO_SEQ_CAUSAL_LM", "MASKED_LM", "SPEECH_SEQ_2_SEQ")
"""Auto mappings whose classes are described. A model type is looked up in this order."""


def architectures() -> dict[str, list[str]]:
    """Class → model types, in the order of the mappings."""
    from transformers.models.auto import modeling_auto

    found: dict[str, list[str]] = {}
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES").items():
            for name in (names,) if isinstance(names, str) else names:
                types = found.setdefault(name, [])
                if model_type not in types:
                    types.append(model_type)
    return found


def build(name: str) -> Iterator[Any]:
    """Models of a class on the meta device, the default one first."""
    import torch
    import transformers

    kind = getattr(transformers, name)
    for config in configs(kind):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = kind(config)
        yield model


def merged(description: dict[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """A description with what another model of the same class has beside."""
    known = {pattern for patterns in description["modules"].values() for pattern in patterns}
    modules = {role: list(patterns) for role, patterns in description["modules"].items()}
    for role, patterns in other["modules"].items():
        modules.setdefault(role, []).extend(pattern for pattern in patterns if pattern not in known)
    read = dict.fromkeys((*description.get("read_at_start", ()), *other.get("read_at_start", ())))
    return {
        **description,
        "modules": {role: modules[role] for role in sorted(modules) if modules[role]},
        "tied": {**other["tied"], **description["tied"]},
        "stacks": {**other["stacks"], **description["stacks"]},
        **({"read_at_start": list(read)} if read else {}),
    }


def describe_all(names: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Descriptions by class, and why a class could not be built."""
    import transformers

    transformers.logging.set_verbosity_error()
    described: dict[str, Any] = {}
    failed: dict[str, str] = {}
    for name in names:
        try:
            described[name] = reduce(merged, map(describe, build(name)))
        except Exception as error:  # whatever a model's own code raises
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"
    return described, failed


def table(described: dict[str, Any], failed: dict[str, str]) -> dict[str, Any]:
    """The content of the file. Rules for names are the same for many classes, so each list of them stands once."""
    import transformers

    types: dict[str, str] = {}
    for name, model_types in architectures().items():
        for model_type in model_types if name in described else ():
            types.setdefault(model_type, name)
    for name, description in described.items():  # a text model inside of another has a type of its own
        types.setdefault(description["model_type"], name)
    renames: dict[str, int] = {}
    rows = {}
    for name in sorted(described):
        description = dict(described[name])
        rules = json.dumps(description.pop("renames"))
        description["renames"] = renames.setdefault(rules, len(renames))
        rows[name] = description
    return {
        "transformers": transformers.__version__,
        "model_types": dict(sorted(types.items())),
        "not_built": dict(sorted(failed.items())),
        "renames": [json.loads(rules) for rules in renames],
        "architectures": rows,
    }


def as_text(content: dict[str, Any]) -> str:
    """JSON with one architecture, and one list of rules, a line."""
    lines = []
    for key, value in content.items():
        if isinstance(value, dict):
            inner = ",\n".join(f"{json.dumps(name)}:{_compact(item)}" for name, item in value.items())
            lines.append(f"{json.dumps(key)}:{{\n{inner}\n}}")
        elif isinstance(value, list):
            lines.append(f"{json.dumps(key)}:[\n" + ",\n".join(map(_compact, value)) + "\n]")
        else:
            lines.append(f"{json.dumps(key)}:{_compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the file is out of date")
    check = parser.parse_args().check
    described, failed = describe_all(architectures())
    text = as_text(table(described, failed))
    print(f"{len(described)} architectures described, {len(failed)} not built, {len(text):,} bytes")
    for name, why in failed.items():
        print(f"  {name}: {why}")
    if check:
        same = TABLE.exists() and TABLE.read_text(encoding="utf-8") == text
        print(f"{TABLE.name} is {'up to date' if same else 'out of date: run python -m tools.architectures.generate'}")
        return 0 if same else 1
    TABLE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
