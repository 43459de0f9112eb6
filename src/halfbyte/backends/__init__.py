"""The table of backends. To add one, write a folder with a class that implements `Backend`, and a line here."""

from __future__ import annotations

from typing import Any

from halfbyte.backends.cpu.backend import Cpu
from halfbyte.backends.cpu.library import load_library
from halfbyte.backends.cpu.whole import WholeCall, WholeDecode
from halfbyte.backends.gpu import Gpu
from halfbyte.backends.protocol import Backend, Parts, Reason
from halfbyte.backends.reference.quantize import Reference
from halfbyte.errors import BackendError, unknown_name
from halfbyte.request import Request

BACKENDS: dict[str, Backend[Any]] = {"gpu": Gpu(), "cpu": Cpu(), "reference": Reference()}
"""All backends, in the order in which "auto" asks them."""

ALIASES = {"triton": "gpu"}
"""Older names that are still accepted."""

__all__ = [
    "ALIASES",
    "BACKENDS",
    "Backend",
    "Cpu",
    "Parts",
    "Reason",
    "Request",
    "WholeCall",
    "WholeDecode",
    "choose_backend",
    "get_backend",
    "state",
]


def choose_backend(name: str, request: Request, *, decoding: bool = False) -> Backend[Any]:
    """The backend of that name; for "auto", the first backend of the table that serves the request.

    If the caller names a backend that cannot serve the request, it raises the reason: there is no silent fallback.
    "auto" gives tensors on the CPU to the backends that take numpy arrays.
    """
    on_device = request.device not in ("numpy", "cpu")
    if isinstance(name, str) and name == "auto":
        return next(
            backend
            for backend in BACKENDS.values()
            if (on_device or not backend.takes_tensors) and _reason_against(backend, request, decoding) is None
        )
    backend = get_backend(name)
    if (reason := _reason_against(backend, request, decoding)) is not None:
        raise BackendError(f"backend {backend.name} cannot do this: {reason}; or choose backend='auto'")
    return backend


def state(name: object) -> tuple[object, ...]:
    """What `choose_backend` depends on besides the request: the backends that it may ask, and the compiled library.

    The library is not loaded for a backend that does not use it.
    """
    if type(name) is str and name == "auto":
        return load_library(), *BACKENDS.values()
    named = BACKENDS.get(ALIASES.get(name, name)) if type(name) is str else None
    return named, load_library() if isinstance(named, Cpu) else None


def get_backend(name: str) -> Backend[Any]:
    """The backend of a name or of an older one; an unknown name raises with the known ones."""
    current = ALIASES.get(name, name) if isinstance(name, str) else name
    if not isinstance(current, str) or current not in BACKENDS:
        raise unknown_name("backend", name, ["auto", *BACKENDS])
    return BACKENDS[current]


def _reason_against(backend: Backend[Any], request: Request, decoding: bool) -> str | None:
    return backend.supports_decoding(request) if decoding else backend.supports(request)
