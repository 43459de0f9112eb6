"""The table of backends. To add one: a file with a class that has the Protocol's methods, and a line here."""

from __future__ import annotations

from halfbyte.backends.cpu import Cpu
from halfbyte.backends.protocol import Backend, Parts, Request
from halfbyte.backends.reference import Reference
from halfbyte.errors import BackendError, unknown_name

BACKENDS: dict[str, Backend] = {"cpu": Cpu(), "reference": Reference()}
"""In the order in which "auto" asks them."""

__all__ = ["BACKENDS", "Backend", "Parts", "Request", "choose_backend"]


def choose_backend(name: str, request: Request, decoding: bool = False) -> Backend:
    """The backend of that name, or for "auto" the first of the table that serves the request.

    A backend asked for by name that cannot serve raises its reason: there is no silent fallback.
    """

    def reason_against(backend: Backend) -> str | None:
        return backend.supports_decoding(request) if decoding else backend.supports(request)

    if name == "auto":
        return next(backend for backend in BACKENDS.values() if reason_against(backend) is None)
    if not isinstance(name, str) or name not in BACKENDS:
        raise unknown_name("backend", name, ["auto", *BACKENDS])
    backend = BACKENDS[name]
    if (reason := reason_against(backend)) is not None:
        raise BackendError(f"backend {name} cannot do this: {reason}; choose backend='reference'")
    return backend
