"""Texts and files of tokens as windows of equal length."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError, UnsupportedError

TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, eq=False)
class Windows:
    """Windows of tokens, and where they are from."""

    tokens: npt.NDArray[np.int64]
    """(windows, length)"""
    sha256: str
    """Of the file that was read."""

    def as_json(self) -> dict[str, object]:
        windows, length = self.tokens.shape
        return {"sha256": self.sha256, "windows": windows, "length": length}


def read_windows(
    model: Path,
    text: Path | None = None,
    tokens: Path | None = None,
    *,
    windows: int | None = None,
    length: int = 1024,
    skip: int = 0,
) -> Windows:
    """Windows of `length` tokens that follow one another in a text, or in a file of tokens.

    A text is cut into tokens by the model's tokenizer.json, without special tokens. A file of tokens is .npy, or plain
    little-endian uint16 (.u16) or uint32 (.u32). skip: tokens left out at the start. windows: how many at most.
    """
    if (text is None) == (tokens is None):
        raise InputError("give either --text or --tokens")
    path = text if text is not None else tokens
    assert path is not None
    if text is not None and not model.is_dir():
        raise InputError(f"{model} is not there, or is no directory; give the folder of a downloaded checkpoint")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror or error}") from error
    ids = _tokenized(model, path, data) if text is not None else _read_tokens(path, data)
    if length < 2:
        raise InputError(f"windows of {length} tokens have nothing to predict; --length must be 2 or more")
    count = max(0, len(ids) - skip) // length
    if count == 0:
        raise InputError(f"{path} has {len(ids)} tokens, {skip} of them skipped: not one window of {length}")
    count = count if windows is None else min(count, windows)
    cut = ids[skip : skip + count * length].reshape(count, length)
    return Windows(np.ascontiguousarray(cut, np.int64), hashlib.sha256(data).hexdigest())


def check_vocabulary(windows: Windows, size: int) -> None:
    """Raise an InputError if a token is not in a vocabulary of that size."""
    largest = int(windows.tokens.max())
    if largest >= size or windows.tokens.min() < 0:
        raise InputError(f"token {largest} is not in the model's vocabulary of {size}: tokens of another model")


def _tokenized(model: Path, path: Path, data: bytes) -> npt.NDArray[np.int64]:
    file = model / TOKENIZER
    if not file.exists():
        raise InputError(f"{model} has no {TOKENIZER}; cut the text into tokens yourself and give --tokens FILE")
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise UnsupportedError("--text needs the package tokenizers; install halfbyte[calibrate]") from error
    try:
        content = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text ({error}); is it a file of --tokens?") from error
    ids = Tokenizer.from_file(str(file)).encode(content, add_special_tokens=False).ids
    return np.asarray(ids, np.int64)


def _read_tokens(path: Path, data: bytes) -> npt.NDArray[np.int64]:
    if path.suffix in (".u16", ".u32"):
        size = int(path.suffix[2:]) // 8
        if len(data) % size:
            raise InputError(f"{path}: {len(data)} bytes are no whole number of {path.suffix[1:]} tokens")
        return np.frombuffer(data, f"<u{size}").astype(np.int64)
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path}: cannot be read as .npy of integers; name plain files of tokens .u16 or .u32"
        ) from error
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu":
        raise InputError(f"{path}: tokens must be integers, not {getattr(found, 'dtype', type(found).__name__)}")
    return found.reshape(-1).astype(np.int64)
