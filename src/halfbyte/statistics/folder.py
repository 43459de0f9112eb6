"""Folders of statistics: safetensors files that describe themselves, and statistics.json about the run.

Every file holds some modules. Its metadata has one entry, `halfbyte_statistics`: a JSON object {"version", "modules"},
where modules is module name → {"tokens", "width", "input_amax", "input_range", "stored_as"}. The arrays of a module are
float32 tensors, as many as there are: `<stored_as>.second_moment`, `.blocks`, `.diagonal`, `.cross_moment`,
`.channel_amax` and `.sample`. Modules with the same input (q, k and v) name one of them in `stored_as`. A file that is
there is whole: it is renamed when it is.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from halfbyte.errors import InputError
from halfbyte.statistics.linear import ARRAYS, LinearStatistics

HEADER = "statistics.json"
VERSION = "1"
MARK = "halfbyte_statistics"


@dataclass(frozen=True)
class Entry:
    """Where the statistics of one module are."""

    file: Path
    stored_as: str
    numbers: Mapping[str, Any]


class Statistics:
    """An open folder. Arrays are read when they are asked for."""

    def __init__(self, path: Path, header: Mapping[str, Any], entries: Mapping[str, Entry]) -> None:
        self.path = path
        self.header = header
        """What statistics.json says of the run."""
        self._entries = dict(entries)

    @property
    def names(self) -> list[str]:
        """Modules: names of weights without `.weight`."""
        return list(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def stored_as(self, name: str) -> str | None:
        """The module under whose name the arrays are stored: equal for modules that share their input."""
        entry = self._entries.get(name)
        return None if entry is None else entry.stored_as

    def holds(self, name: str) -> frozenset[str]:
        """The names of the arrays that are known of a module, none of them read."""
        entry = self._entries.get(name)
        if entry is None:
            return frozenset()
        with _open(entry.file) as file:
            present = set(file.keys())
        return frozenset(part for part in ARRAYS if f"{entry.stored_as}.{part}" in present)

    def get(self, name: str, width: int | None = None, arrays: Iterable[str] = ARRAYS) -> LinearStatistics | None:
        """Statistics of a module, checked; None if the folder has none.

        width: the inputs of its weight. arrays: those to read, if not all.
        """
        entry = self._entries.get(name)
        if entry is None:
            return None
        with _open(entry.file) as file:
            present = set(file.keys())
            names = {part: f"{entry.stored_as}.{part}" for part in arrays}
            read = {part: file.get_tensor(tensor) for part, tensor in names.items() if tensor in present}
        found = LinearStatistics(**entry.numbers, **read)
        found.check(f"{entry.file}: {name}", width)
        return found


def open_statistics(path: Path | str) -> Statistics:
    """Open a folder that `halfbyte calibrate` wrote, or one of its files, or an imatrix file of llama.cpp."""
    path = Path(path)
    if path.is_file() and path.suffix != ".safetensors":
        from halfbyte.statistics.imatrix import open_imatrix

        return open_imatrix(path)
    if not path.exists():
        raise InputError(f"{path} is not there; `halfbyte calibrate MODEL --text FILE -o {path}` makes statistics")
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        raise InputError(f"{path} holds no statistics: no safetensors file is in it")
    entries: dict[str, Entry] = {}
    for file in files:
        for name, entry in _entries(file).items():
            if name in entries:
                raise InputError(f"{path}: module {name} is in both {entries[name].file.name} and {file.name}")
            entries[name] = entry
    return Statistics(path, _header(path / HEADER) if path.is_dir() else {}, entries)


def is_statistics(path: Path) -> bool:
    """Whether a safetensors file is one of statistics."""
    with _open(path) as file:
        return MARK in (file.metadata() or {})


def write_statistics(
    path: Path, modules: Mapping[str, LinearStatistics], stored_as: Mapping[str, str] | None = None
) -> None:
    """Write one file of a folder: to a temporary name, then renamed.

    stored_as: module → the module whose arrays are its own too; those are written once.
    """
    shared = dict(stored_as or {})
    described: dict[str, dict[str, Any]] = {}
    tensors: dict[str, Any] = {}
    for name, found in modules.items():
        found.check(name)
        place = shared.get(name, name)
        numbers = {field.name: getattr(found, field.name) for field in fields(found) if field.name not in ARRAYS}
        described[name] = {**numbers, "stored_as": place}
        for part, array in found.arrays():
            tensors.setdefault(f"{place}.{part}", np.ascontiguousarray(array))
    if not tensors:
        tensors["nothing"] = np.zeros(0, np.float32)
    path.parent.mkdir(parents=True, exist_ok=True)
    part_file = path.with_name(f"{path.name}.part")
    said = json.dumps({"version": VERSION, "modules": described}, allow_nan=False)
    save_file(tensors, part_file, {MARK: said})  # one entry: the library writes several in any order
    os.replace(part_file, path)


def write_header(folder: Path, content: Mapping[str, Any]) -> None:
    """Write statistics.json."""
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{HEADER}.part"
    part.write_text(json.dumps({"format": "halfbyte statistics", "version": VERSION, **content}, indent=1) + "\n")
    os.replace(part, folder / HEADER)


def _header(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(found).__name__}")
    return found


def _open(path: Path) -> Any:
    try:
        return safe_open(path, "np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path}: cannot be read as safetensors: {error}") from error


def _entries(path: Path) -> dict[str, Entry]:
    with _open(path) as file:
        metadata = file.metadata() or {}
    if MARK not in metadata:
        raise InputError(f"{path} is no file of statistics: its metadata has no {MARK}")
    try:
        said = json.loads(metadata[MARK])
        if said["version"] != VERSION:
            raise InputError(f"{path}: statistics of version {said['version']}; this halfbyte reads version {VERSION}")
        return dict(_parsed(path, said["modules"]))
    except InputError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: the modules of its metadata cannot be read: {error!r}") from error


def _parsed(path: Path, modules: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Entry]]:
    for name, said in modules.items():
        numbers = {
            "tokens": int(said["tokens"]),
            "width": int(said["width"]),
            "input_amax": float(said["input_amax"]),
            "input_range": None if said.get("input_range") is None else float(said["input_range"]),
        }
        yield name, Entry(path, str(said["stored_as"]), numbers)
