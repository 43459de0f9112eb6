"""Compiled kernels on disk, so that only the first process on a machine compiles.

One file per kernel, named by a hash of all that its code depends on. A file is written under another name and then
renamed, so that processes never see half of one. A file that is damaged is ignored and written again. A folder that
cannot be written is no error: then every process compiles.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from halfbyte.backends.gpu.driver.commands import Image

MAGIC = b"halfbyte kernel 1\n"
"""The first line of a file. Another number for another form of file."""


def folder() -> Path:
    """HALFBYTE_CACHE, else `halfbyte` in XDG_CACHE_HOME, else ~/.cache/halfbyte."""
    chosen = os.environ.get("HALFBYTE_CACHE")
    if chosen:
        return Path(chosen)
    above = os.environ.get("XDG_CACHE_HOME")
    return (Path(above) if above else Path.home() / ".cache") / "halfbyte"


def cached(parts: object, make: Callable[[], Image]) -> Image:
    """The image of a kernel, from disk or made. `parts`: all that it depends on, as JSON can write it."""
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    path = folder() / "kernels" / f"{key}.bin"
    found = _read(path)
    if found is None:
        found = make()
        _write(path, found)
    return found


def is_cached(parts: object) -> bool:
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return _read(folder() / "kernels" / f"{key}.bin") is not None


def _read(path: Path) -> Image | None:
    """The image of a file; None where there is none, or where it is not whole."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if not content.startswith(MAGIC):
        return None
    header, _, code = content[len(MAGIC) :].partition(b"\n")
    try:
        fields = json.loads(header)
        digest = fields.pop("sha256")
        image = Image(code=code, **fields)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return image if digest == _digest(image) else None


def _write(path: Path, image: Image) -> None:
    fields = _fields(image) | {"sha256": _digest(image)}
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + json.dumps(fields).encode() + b"\n" + image.code)
            os.replace(name, path)
        except OSError:
            os.unlink(name)


def _fields(image: Image) -> dict[str, str | int]:
    return {"name": image.name, "threads": image.threads, "shared": image.shared, "words": image.words}


def _digest(image: Image) -> str:
    return hashlib.sha256(json.dumps(_fields(image)).encode() + image.code).hexdigest()
