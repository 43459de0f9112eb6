"""Ask transformers what the modules of a model are: `--modules-from-model`.

    python -m halfbyte.models.from_model DIRECTORY trust|known OUTPUT

The class that config.json names is built on the meta device, where weights have a shape and no bytes, in a process of
its own. The answer is what the shipped table has for a class, so it takes the table's place for one model.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from halfbyte.child import answer, ask
from halfbyte.errors import ModelCodeError
from halfbyte.models.model_class import find_class, need

TRUST, KNOWN = "trust", "known"
"""Words for the command line: run code that comes with the checkpoint; only transformers' own classes."""


def modules_from_model(path: Path, trust_remote_code: bool = False) -> dict[str, Any]:
    """The description (`describe_model.describe`) of the model whose config.json lies in a directory.

    ModelCodeError: transformers is not installed, does not have the class, or cannot build it; or the class comes as
    code and trust_remote_code is False.
    """
    need("transformers", "torch")
    if not (path / "config.json").is_file():
        raise ModelCodeError(f"{path} holds no config.json, which names the model's class")
    try:
        found = ask(__name__, str(path.resolve()), TRUST if trust_remote_code else KNOWN, settings=NO_GPU)
    except ModelCodeError as error:
        raise ModelCodeError(f"transformers cannot say what the modules of {path} are: {error}") from error
    return dict(found)


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""A model without bytes needs no card; a process that finds one takes memory on it."""


def describe_directory(path: str, trust: str) -> dict[str, Any]:
    """The other process: build the model and describe it."""
    from halfbyte.models.describe_model import describe

    return describe(build(Path(path), trust == TRUST))


def build(path: Path, trust_remote_code: bool) -> Any:
    """The model of a directory on the meta device, unquantized: a quantized layer would hide what it stands for."""
    import torch

    model_class, config = find_class(path, trust_remote_code)
    config = copy.deepcopy(config)
    for part in (config, config.get_text_config()):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    with torch.device("meta"):
        return model_class(config).eval()


if __name__ == "__main__":
    answer(describe_directory)
