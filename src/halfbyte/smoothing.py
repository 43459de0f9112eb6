"""Factors that are folded into a model before it is quantized: powers of two, so that no stored value is rounded.

A `Link` divides what makes some channels by factors and multiplies the columns of all that read them. The file is JSON:
`{"halfbyte_smoothing": "1", …, "links": [{"origin", "into", "norm", "repeats", "head", "exponents"}]}`. The exponents
are base64 of signed bytes, one per output of the origin. Bytes of the same links are the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.errors import InputError

MARK = "halfbyte_smoothing"
VERSION = "1"
FILE = "halfbyte_smoothing.json"
"""What the file is called in a checkpoint."""

I8 = npt.NDArray[np.int8]
LARGEST = 8
"""Exponents lie between −8 and 8."""


@dataclass(frozen=True, eq=False)
class Link:
    """The factors 2^exponents of one place."""

    origin: str
    """The norm, or the linear layer, that is divided by them."""
    into: tuple[str, ...]
    """The linear layers whose columns are multiplied by them."""
    norm: bool
    """Whether the origin is a norm."""
    exponents: I8
    """One per channel that the origin makes."""
    repeats: int = 1
    """How often in a row each head of the origin is read."""
    head: int = 0
    """Width of a head; 0: all of it is one."""

    @property
    def columns(self) -> I8:
        """One exponent per channel that is read."""
        return repeated(self.exponents, self.repeats, self.head)

    def as_json(self) -> dict[str, Any]:
        return {
            "origin": self.origin,
            "into": list(self.into),
            "norm": self.norm,
            "repeats": self.repeats,
            "head": self.head,
            "exponents": base64.b64encode(self.exponents.tobytes()).decode(),
        }


@dataclass(frozen=True, eq=False)
class Smoothing:
    """All links of a model."""

    links: tuple[Link, ...]
    origin: Mapping[str, Any] = field(default_factory=dict)
    """What the factors were chosen from."""

    @cached_property
    def columns(self) -> dict[str, I8]:
        """Linear layer → exponents by which its columns grow."""
        return {module: link.columns for link in self.links for module in link.into}

    @cached_property
    def rows(self) -> dict[str, I8]:
        """Linear layer → exponents by which its rows shrink."""
        return {link.origin: link.exponents for link in self.links if not link.norm}

    @cached_property
    def vectors(self) -> dict[str, I8]:
        """Tensor that is no matrix → exponents by which its elements shrink: weights of norms, and biases."""
        found = {f"{link.origin}.bias": link.exponents for link in self.links}
        return found | {f"{link.origin}.weight": link.exponents for link in self.links if link.norm}

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps([link.as_json() for link in self.links]).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        return {MARK: VERSION, **self.origin, "links": [link.as_json() for link in self.links]}


def repeated(values: npt.NDArray[Any], repeats: int, head: int) -> npt.NDArray[Any]:
    """One value per channel that is read, from one per channel that is made.

    >>> repeated(np.array([1, 2, 3, 4]), 2, 2).tolist()
    [1, 2, 1, 2, 3, 4, 3, 4]
    """
    if repeats == 1:
        return values
    return np.ascontiguousarray(np.repeat(values.reshape(-1, 1, head), repeats, axis=1)).reshape(-1)


def scaled(
    values: npt.NDArray[Any], columns: I8 | None, rows: I8 | None = None, *, dtype: npt.DTypeLike = np.float32
) -> npt.NDArray[Any]:
    """values · 2^columns / 2^rows, in that dtype."""
    found = np.array(values, np.float32)
    if columns is not None:
        found *= powers(columns)
    if rows is not None:
        found *= powers(-rows.astype(np.int32))[:, None] if found.ndim == 2 else powers(-rows.astype(np.int32))
    return found if np.dtype(dtype) == np.float32 else found.astype(dtype)


def powers(exponents: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """2^exponents."""
    return np.ldexp(np.float32(1), exponents.astype(np.int32)).astype(np.float32)


def write_smoothing(path: Path, smoothing: Smoothing) -> None:
    """Write the file: to a name of its own, then renamed, because several ranks may write it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.urandom(6).hex()}.part")
    part.write_text(json.dumps(smoothing.as_json(), indent=1) + "\n")
    os.replace(part, path)


def read_smoothing(path: Path) -> Smoothing:
    """Read a file of factors; what does not fit together is an error."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(said, dict) or said.get(MARK) != VERSION:
        raise InputError(f"{path} is no file of smoothing factors: it has no {MARK} of version {VERSION}")
    try:
        links = tuple(_link(one) for one in said["links"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(f"{path}: its links cannot be read: {error!r}") from error
    _check(path, links)
    return Smoothing(links, {key: value for key, value in said.items() if key not in (MARK, "links")})


def _link(said: Mapping[str, Any]) -> Link:
    exponents = np.frombuffer(base64.b64decode(said["exponents"], validate=True), np.int8)
    into = tuple(str(module) for module in said["into"])
    return Link(str(said["origin"]), into, bool(said["norm"]), exponents, int(said["repeats"]), int(said["head"]))


def _check(path: Path, links: Iterable[Link]) -> None:
    seen: set[str] = set()
    for link in links:
        if np.abs(link.exponents.astype(np.int32)).max(initial=0) > LARGEST:
            raise InputError(f"{path}: {link.origin} has exponents beyond ±{LARGEST}; the file is damaged")
        whole = link.head == 0 or len(link.exponents) % link.head == 0
        if not whole or link.repeats < 1 or (link.repeats > 1 and link.head < 1):
            raise InputError(f"{path}: {link.origin} has heads of {link.head} that do not fit its exponents")
        for module in link.into:
            if module in seen:
                raise InputError(f"{path}: the columns of {module} are scaled twice")
            seen.add(module)
