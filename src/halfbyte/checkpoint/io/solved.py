"""Folders of weights whose codes are decided already: safetensors files that a conversion writes out as they are.

For a weight `name` there are the tensors `name.codes` (uint8, packed), `name.scales` (uint8) and, for NVFP4,
`name.global_amax` (float32, one number: the amax of all weights that share its tensor scale). The metadata of every
file has one entry, `halfbyte_solved`: the JSON object {"version", "format", "contract", "method"}; also {"headroom"},
the numbers that amaxes may have been multiplied by, where these are not the usual ones.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import Contract
from halfbyte.errors import CheckpointError
from halfbyte.formats import BlockFormat
from halfbyte.methods.optimal import checked_headroom

VERSION = "1"
MARK = "halfbyte_solved"
HEADER = "solved.json"
"""What the run that solved them says of itself, in a folder of `convert --calibrate`."""


class SolvedWeight(NamedTuple):
    """One weight, decided."""

    codes: U8
    scales: U8
    global_amax: np.float32 | None
    """With its headroom. None for formats without a tensor scale."""


def write_solved(
    path: Path,
    weights: Mapping[str, SolvedWeight],
    format: BlockFormat,
    contract: Contract,
    method: object,
    headroom: Sequence[float] | None = None,
) -> None:
    """Write one file of a folder, weights by the names of their tensors: to a temporary name, then renamed."""
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        tensors[f"{name}.codes"] = np.ascontiguousarray(weight.codes, np.uint8)
        tensors[f"{name}.scales"] = np.ascontiguousarray(weight.scales, np.uint8)
        if weight.global_amax is not None:
            tensors[f"{name}.global_amax"] = np.array([weight.global_amax], np.float32)
    said = {"version": VERSION, "format": format.name, "contract": repr(contract), "method": str(method)}
    if headroom is not None:
        said["headroom"] = json.dumps(list(headroom))
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    save_file(tensors, part, {MARK: json.dumps(said)})
    os.replace(part, path)


class SolvedFolder:
    """An open folder. Arrays are read when they are asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else []
        if not files:
            raise CheckpointError(f"{path} holds no solved weights: no safetensors file is in it")
        self._files: dict[str, Path] = {}
        self.said: dict[str, str] = {}
        """format, contract, method and perhaps headroom, which all files agree on."""
        digest = hashlib.sha256()
        for file in files:
            with _open(file) as opened:
                said, names = _said(file, opened.metadata() or {}), list(opened.keys())
            if self.said and said != self.said:
                raise CheckpointError(f"{path}: {file.name} was solved for {said}, {files[0].name} for {self.said}")
            self.said = said
            for name in names:
                if name in self._files:
                    raise CheckpointError(f"{path}: {name} is in both {self._files[name].name} and {file.name}")
                self._files[name] = file
            digest.update(file.name.encode())
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, "sha256").digest())
        self.digest = digest.hexdigest()

    @property
    def device(self) -> str:
        """What solved the weights; "" if the folder does not say so."""
        try:
            said = json.loads((self.path / HEADER).read_text())
        except (OSError, ValueError):
            return ""
        return str(said.get("device", "")) if isinstance(said, dict) else ""

    @property
    def headroom(self) -> tuple[float, ...] | None:
        """What amaxes may have been multiplied by; None: the usual headrooms."""
        said = self.said.get("headroom")
        return None if said is None else _headroom(said)

    def check(self, format: BlockFormat, contract: Contract) -> None:
        """Raise if the codes are those of another format or contract."""
        wanted = {"format": format.name, "contract": repr(contract)}
        for key, value in wanted.items():
            if self.said[key] != value:
                raise CheckpointError(
                    f"{self.path}: solved for {key} {self.said[key]}, but this conversion has {value}"
                )

    def __contains__(self, name: str) -> bool:
        return f"{name}.codes" in self._files and f"{name}.scales" in self._files

    def rows(self, name: str, shape: tuple[int, int], start: int, stop: int, format: BlockFormat) -> tuple[U8, U8]:
        """Codes and scales of some rows of a weight of that shape."""
        rows, columns = shape
        found = []
        for part, width in (("codes", columns // format.codes_per_byte), ("scales", columns // format.block)):
            with _open(self._files[f"{name}.{part}"]) as file:
                tensor = file.get_slice(f"{name}.{part}")
                if tuple(tensor.get_shape()) != (rows, width) or tensor.get_dtype() != "U8":
                    raise CheckpointError(
                        f"{self.path}: {name}.{part} is {tensor.get_dtype()} of shape {tuple(tensor.get_shape())}; "
                        f"a weight of shape {shape} needs U8 of shape {(rows, width)}"
                    )
                found.append(np.ascontiguousarray(tensor[start:stop]))
        return found[0], found[1]

    def amax(self, name: str) -> np.float32:
        """The amax that the codes of a weight were decided with."""
        key = f"{name}.global_amax"
        if key not in self._files:
            raise CheckpointError(f"{self.path} has no {key}, which a tensor scale needs")
        with _open(self._files[key]) as file:
            value: F32 = np.asarray(file.get_tensor(key), np.float32).reshape(-1)
        if value.size != 1:
            raise CheckpointError(f"{self.path}: {key} has {value.size} numbers, expected one")
        return np.float32(value[0])


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path}: cannot be read as safetensors: {error}") from error


def _said(path: Path, metadata: Mapping[str, str]) -> dict[str, str]:
    try:
        said = json.loads(metadata[MARK])
        if said["version"] == VERSION:
            headroom = {} if "headroom" not in said else {"headroom": str(said["headroom"])}
            if headroom:
                _headroom(headroom["headroom"])
            return {key: str(said[key]) for key in ("format", "contract", "method")} | headroom
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is no file of solved weights: its metadata has no usable {MARK}") from error
    raise CheckpointError(f"{path}: solved weights of version {said['version']}; this halfbyte reads version {VERSION}")


def _headroom(text: str) -> tuple[float, ...]:
    """The numbers of a headroom in metadata; a ValueError or TypeError if these are none that a headroom may have."""
    return checked_headroom(tuple(float(number) for number in json.loads(text)), "metadata") or ()
