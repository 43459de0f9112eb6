"""Reading vectors: an index.json and one safetensors file per case, in a directory or in a zip archive of one."""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize

from halfbyte.errors import VectorError

Tensors = Mapping[str, npt.NDArray[Any]]

UNREADABLE = (OSError, KeyError, zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)
"""What reading raises: files that are not there; archives that are damaged, encrypted, or packed in another way."""

OPERANDS = ("input", "activations", "mx_codes", "mx_scales", "rht_out")
"""Tensors of a case that are given, never compared. Decode-only cases add their own (peer_outputs.py)."""

SAFETENSORS_DTYPES: dict[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "U8": np.uint8,
    "I8": np.int8,
    "I64": np.int64,
    "I32": np.int32,
    "BOOL": np.bool_,
}


@dataclass(frozen=True)
class Case:
    """One golden case: what the peer was asked, and what it answered."""

    name: str
    peer: str
    format: str
    config: Mapping[str, Any]
    tensors: Tensors
    unstable: tuple[str, ...] = ()
    """Tensors whose bytes derive from NaN in the peer and must not be compared."""
    conventions: Mapping[str, str] = field(default_factory=dict)


class Vectors:
    """A directory or zip archive of cases. Tensors are read when a case is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        if path.is_file() and zipfile.is_zipfile(path):
            try:
                self._archive = zipfile.ZipFile(path)
            except UNREADABLE as error:
                raise VectorError(f"{path} cannot be read as a zip archive: {error}; fetch it again") from error
        elif not path.is_dir():
            raise VectorError(f"{path} is neither a directory of vectors nor a zip archive of one")
        try:
            index = json.loads(self._read("index.json"))
            self.entries: list[dict[str, Any]] = [dict(entry) for entry in index["cases"]]
            for entry in self.entries:
                for key in ("name", "peer", "format", "config"):
                    entry[key]
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise VectorError(
                f"{path}/index.json: {type(error).__name__}: {error}; expected an object whose 'cases' have name, "
                "peer, format and config"
            ) from error

    def _read(self, name: str) -> bytes:
        try:
            return self._archive.read(name) if self._archive else (self.path / name).read_bytes()
        except (FileNotFoundError, KeyError) as error:
            raise VectorError(f"{self.path} holds no {name}: not a folder of vectors, or a part is missing") from error
        except UNREADABLE as error:
            raise VectorError(f"{self.path}: {name} cannot be read: {error}; fetch it again") from error

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.entries)

    def case(self, entry: Mapping[str, Any]) -> Case:
        """The case of an index entry, tensors loaded."""
        raw = self._read(f"{entry['name']}.safetensors")
        try:
            tensors = {name: _array(name, part) for name, part in deserialize(raw)}  # type: ignore[no-untyped-call]
        except SafetensorError as error:
            raise VectorError(f"{entry['name']}.safetensors: {error}") from error
        return Case(
            name=entry["name"],
            peer=entry["peer"],
            format=entry["format"],
            config=entry["config"],
            tensors=tensors,
            unstable=tuple(entry.get("unstable", ())),
            conventions=entry.get("conventions", {}),
        )


def _array(name: str, part: Mapping[str, Any]) -> npt.NDArray[Any]:
    if part["dtype"] not in SAFETENSORS_DTYPES:
        raise VectorError(f"tensor {name} has dtype {part['dtype']}; known: {', '.join(SAFETENSORS_DTYPES)}")
    array = np.frombuffer(part["data"], dtype=SAFETENSORS_DTYPES[part["dtype"]])
    return array.reshape(part["shape"])


def load_vectors(path: str | Path) -> Vectors:
    """Open a directory or zip archive of vectors; reads the index only."""
    return Vectors(Path(path))
