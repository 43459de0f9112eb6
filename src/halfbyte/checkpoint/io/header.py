"""The safetensors header: read, validate, write. A header is hostile until every entry has been checked.

A file is 8 bytes (little-endian length of the header), the header (JSON: name → dtype, shape, data_offsets), the data.
Offsets are relative to the data; together they must cover it without overlap or hole, so that no byte is ambiguous.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from halfbyte.checkpoint.io.absent import refuse_absent
from halfbyte.errors import CheckpointError

MAX_HEADER = 100_000_000
"""Largest header that is read, in bytes: the limit of the format's own library."""

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "F64": 64,
    "I64": 64,
    "U64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
"""Bits per element, for every dtype of the format."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    name: str
    dtype: str
    """As the header spells it: BF16, F8_E4M3, U8 and so on."""
    shape: tuple[int, ...]
    start: int
    """First byte in the file, counted from the file's own start."""
    stop: int

    @property
    def bytes(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A validated header, with what is needed to notice that the file changed."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    """In the order of the data."""
    metadata: Mapping[str, str]
    file_size: int
    modified: int
    """Nanoseconds, as the file system tells them."""
    digest: str
    """SHA-256 of the header's bytes."""


def read_header(path: Path) -> Header:
    """Read and check one header; no tensor data is touched.

    Refused: a file shorter than its header says, a header that is no JSON object or longer than 100 MB, entries with an
    unknown dtype, a shape that is no list of sizes, offsets that do not fit dtype and shape, overlaps, holes, and data
    that ends before or after the file does.
    """
    refuse_absent(path)
    try:
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            raw = _read_raw(path, file, stat.st_size)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    parsed = _parse(path, raw)
    metadata = _metadata(path, parsed.pop("__metadata__", {}))
    tensors = _tensors(path, parsed, 8 + len(raw), stat.st_size)
    digest = hashlib.sha256(raw).hexdigest()
    return Header(path, tensors, metadata, stat.st_size, stat.st_mtime_ns, digest)


def _read_raw(path: Path, file: BinaryIO, size: int) -> bytes:
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    # The lengths 640, 1152 and 19280 begin with the same bytes as pickle and zip files, but such headers fit the file.
    if prefix[:2] in (b"PK", b"\x80\x02", b"\x80\x04") and 8 + length > size:
        raise CheckpointError(
            f"{path}: this is a pickle (or zip) file, not safetensors; convert it to safetensors first"
        )
    if len(prefix) < 8:
        raise CheckpointError(f"{path}: {size} bytes are too short for a safetensors file")
    if length > MAX_HEADER:
        raise CheckpointError(f"{path}: a header of {length} bytes exceeds the limit of {MAX_HEADER}; not safetensors?")
    if 8 + length > size:
        raise CheckpointError(f"{path}: the header needs {8 + length} bytes, but the file has {size}: it is truncated")
    return file.read(length)


def _parse(path: Path, raw: bytes) -> dict[str, object]:
    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            seen: set[str] = set()
            for name, _ in pairs:
                if name in seen:
                    raise CheckpointError(f"{path}: the header names {name!r} twice")
                seen.add(name)
        return found

    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, or a number of thousands of digits
        raise CheckpointError(f"{path}: the header is no JSON ({error}); not safetensors, or damaged") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: the header is a JSON {type(parsed).__name__}, not an object")
    return parsed


def _metadata(path: Path, given: object) -> dict[str, str]:
    if not isinstance(given, dict) or not all(isinstance(value, str) for value in given.values()):
        raise CheckpointError(f"{path}: __metadata__ must map names to texts")
    return {str(key): str(value) for key, value in given.items()}


def _tensors(path: Path, parsed: Mapping[str, object], data: int, size: int) -> dict[str, TensorInfo]:
    entries = sorted((_entry(path, name, value, data) for name, value in parsed.items()), key=_position)
    at = data
    previous = None
    for info in entries:
        if info.start < at:
            raise CheckpointError(f"{path}: tensor {info.name} overlaps {previous or 'the header'}")
        if info.start > at:
            raise CheckpointError(f"{path}: {info.start - at} bytes before tensor {info.name} belong to no tensor")
        at, previous = info.stop, info.name
    if at > size:
        raise CheckpointError(
            f"{path}: tensor {previous} ends at byte {at}, but the file has {size}: it is truncated; fetch it again"
        )
    if at < size:
        raise CheckpointError(f"{path}: {size - at} bytes after the last tensor belong to no tensor")
    return {info.name: info for info in entries}


def _position(info: TensorInfo) -> tuple[int, int, str]:
    return info.start, info.stop, info.name


def _entry(path: Path, name: str, value: object, data: int) -> TensorInfo:
    if not encodable(name):
        raise CheckpointError(f"{path}: tensor {name!r} has a name that is no Unicode text")
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{path}: tensor {name!r} needs exactly dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise CheckpointError(f"{path}: tensor {name} has dtype {dtype!r}; known: {', '.join(DTYPE_BITS)}")
    if not isinstance(shape, list) or not all(type(axis) is int and 0 <= axis < 2**63 for axis in shape):
        raise CheckpointError(f"{path}: tensor {name} has shape {shape!r}, which is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(end) is int and end >= 0 for end in offsets):
        raise CheckpointError(f"{path}: tensor {name} has data_offsets {offsets!r}, which are no two positions")
    start, stop = offsets
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or stop - start != bits // 8:
        raise CheckpointError(
            f"{path}: tensor {name}, {dtype} {shape}, needs {bits / 8:g} bytes, but data_offsets span {stop - start}"
        )
    return TensorInfo(name, dtype, tuple(shape), data + start, data + stop)


def encodable(text: str) -> bool:
    """Whether a text can be written as UTF-8: JSON can spell halves of surrogate pairs, which cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int:
    """Bytes of a tensor of that dtype and shape."""
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def encode_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes in front of the data, for tensors (name, dtype, shape) that follow one another in this order.

    Padded with spaces so that the data starts at a multiple of 8 bytes.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        if name in entries:
            raise CheckpointError(f"two output tensors are called {name}")
        stop = at + tensor_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, stop]}
        at = stop
    raw = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw
