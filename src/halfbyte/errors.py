"""The errors of halfbyte: one parent, few children, each a kind of mistake a caller can act on."""

from __future__ import annotations

from collections.abc import Iterable


class HalfbyteError(Exception):
    """Parent of every error that halfbyte raises on purpose."""


class UnknownNameError(HalfbyteError, ValueError):
    """A format, contract, method, backend or option name that does not exist. The message lists those that do."""


class UnsupportedError(HalfbyteError, ValueError):
    """The names exist, but this combination has no definition (a tile that a contract lacks, a backend's limit)."""


class BackendError(UnsupportedError):
    """A backend that was asked for by name has no kernel for this; another backend does."""


class InputError(HalfbyteError, ValueError):
    """The tensor itself breaks a rule: dtype, shape, an amax that is no amax."""


class CheckpointError(HalfbyteError):
    """A checkpoint that cannot be read, planned, written or continued. The message says which file or tensor."""


class VectorError(HalfbyteError):
    """A directory of conformance vectors that cannot be read."""


def unknown_name(kind: str, name: object, known: Iterable[object]) -> UnknownNameError:
    """The one wording for a name that is not in a table."""
    listed = ", ".join(sorted(map(str, known)))
    return UnknownNameError(f"unknown {kind} {name!r}; known: {listed}")
