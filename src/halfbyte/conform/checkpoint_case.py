"""A case that is a whole checkpoint: written to files, converted by `halfbyte.checkpoint`, read back."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from halfbyte.checkpoint import Options, Resources, Rules, make_plan, run
from halfbyte.checkpoint.io.index import INDEX, open_checkpoint
from halfbyte.checkpoint.io.views import NUMPY
from halfbyte.conform.vectors import Case

GIVEN, MADE = "in.", "out."
"""How a case's tensors are named: what the peer was given, and what it made of it."""

SHARDS = 3


def convert_case(case: Case) -> dict[str, npt.NDArray[Any]]:
    """What the converter makes of the case's checkpoint, under the names of the case.

    The tensors are spread over three files in turns, so that partners lie apart.
    """
    given = {name.removeprefix(GIVEN): x for name, x in case.tensors.items() if name.startswith(GIVEN)}
    rules = Rules(experts_only=True)
    options = Options(contract="transformer_engine", method="amax", activations="unit", rules=rules)
    with tempfile.TemporaryDirectory() as folder:
        source, destination = Path(folder) / "source", Path(folder) / "converted"
        _write(source, given, case.config["config.json"])
        run(make_plan(source, options), destination, Resources(workers=1, max_memory=1 << 28, sync=False))
        return {f"{MADE}{name}": x for name, x in _read(destination).items()}


def _write(folder: Path, tensors: Mapping[str, npt.NDArray[Any]], converted: Mapping[str, Any]) -> None:
    folder.mkdir()
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        part = {name: x for number, (name, x) in enumerate(sorted(tensors.items())) if number % SHARDS == shard}
        save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    config = {key: value for key, value in converted.items() if key != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _read(folder: Path) -> dict[str, npt.NDArray[Any]]:
    """Every tensor; float8 as bytes and scalars as one element, which is how the vectors hold them."""
    found: dict[str, npt.NDArray[Any]] = {}
    for name, tensor in open_checkpoint(folder).tensors.items():
        raw = np.fromfile(folder / tensor.file, np.uint8, tensor.info.bytes, offset=tensor.info.start)
        found[name] = raw.view(NUMPY[tensor.info.dtype]).reshape(tensor.info.shape or (1,))
    return found
