"""The errors of halfbyte: one parent class, and one child class per kind of mistake that a caller can act on."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence

MANY = 40
"""Above this number of known names, an error lists only the nearest."""


class HalfbyteError(Exception):
    """Parent of every error that halfbyte raises on purpose."""


class UnknownNameError(HalfbyteError, ValueError):
    """A format, contract, method, backend or option name that does not exist. The message lists those that do."""


class UnsupportedError(HalfbyteError, ValueError):
    """The names exist, but this combination is not defined (a tile that a contract lacks, a limit of a backend)."""


class BackendError(UnsupportedError):
    """The backend that the caller named has no kernel for this request, but another backend has one."""


class InputError(HalfbyteError, ValueError):
    """The tensor itself breaks a rule: its dtype, its shape, or an amax that cannot be one."""


class RowIndexError(InputError, IndexError):
    """A row that a tensor does not have. It is an IndexError too, so that loops over rows end."""


class CheckpointError(HalfbyteError):
    """A checkpoint that cannot be read, planned, written or continued. The message says which file or tensor."""


class ModelCodeError(HalfbyteError):
    """transformers, vLLM or a model's own code could not be asked, or failed. The message says which and why."""


class VectorError(HalfbyteError):
    """A directory of conformance vectors that cannot be read."""


def refuse_array(what: str, value: object) -> None:
    """Raise if an array or a tensor is given where one name, number or truth value is expected."""
    shape = getattr(value, "shape", ())
    if hasattr(value, "ndim") and ((isinstance(shape, Sequence) and len(shape)) or type(value).__name__ == "ndarray"):
        raise InputError(f"{what} takes a single value, not an array of shape {tuple(shape)}")


def unknown_name(kind: str, name: object, known: Iterable[object], listed: int = MANY) -> UnknownNameError:
    """The error for a name that is not in a table; every unknown name gets this wording.

    listed: if more names than this are known, only the nearest are listed.
    """
    names = sorted(map(str, known))
    if len(names) <= listed:
        return UnknownNameError(f"unknown {kind} {name!r}; known: {', '.join(names)}")
    return UnknownNameError(f"unknown {kind} {name!r}; nearest of {len(names)}: {', '.join(nearest(str(name), names))}")


def nearest(name: str, known: Sequence[str]) -> list[str]:
    """The known names that look most like this one. Of names that differ in their numbers alone, one with the same."""
    forms: dict[str, list[str]] = {}
    for other in known:
        forms.setdefault(re.sub(r"\d+", "#", other), []).append(other)
    numbers = re.findall(r"\d+", name)
    alike = difflib.get_close_matches(re.sub(r"\d+", "#", name), forms, cutoff=0.0)
    return [next((one for one in forms[form] if re.findall(r"\d+", one) == numbers), forms[form][0]) for form in alike]
