"""The table of backends. To add one: a file with a class that has the Protocol's methods, and a line here."""

from __future__ import annotations

from halfbyte.backends.cpu.backend import Cpu
from halfbyte.backends.gpu import Gpu
from halfbyte.backends.protocol import Backend, DeviceBackend, DeviceParts, Parts, Request
from halfbyte.backends.reference.quantize import Reference
from halfbyte.errors import BackendError, unknown_name

BACKENDS: dict[str, Backend] = {"cpu": Cpu(), "reference": Reference()}
"""Those that take numpy arrays, in the order in which "auto" asks them."""

DEVICE_BACKENDS: dict[str, DeviceBackend] = {"gpu": Gpu()}
"""Those that take tensors where they lie. "auto" asks them first, for tensors that lie on a device."""

ALIASES = {"triton": "gpu"}
"""Other names that callers may use."""

__all__ = [
    "ALIASES",
    "BACKENDS",
    "DEVICE_BACKENDS",
    "Backend",
    "DeviceBackend",
    "DeviceParts",
    "Parts",
    "Request",
    "backend_name",
    "choose_backend",
    "choose_device_backend",
]


def backend_name(name: str) -> str:
    """The name in the table; what is no alias stays as it is."""
    return ALIASES.get(name, name) if isinstance(name, str) else ""


def choose_device_backend(name: str, request: Request, decoding: bool = False) -> DeviceBackend | None:
    """The device backend that serves a request, or None where a backend on numpy arrays has to.

    One that is asked for by name and cannot serve raises its reason.
    """

    def reason_against(backend: DeviceBackend) -> str | None:
        return backend.supports_decoding(request) if decoding else backend.supports(request)

    if name == "auto":
        on_device = request.device not in ("numpy", "cpu")
        able = (backend for backend in DEVICE_BACKENDS.values() if on_device and reason_against(backend) is None)
        return next(able, None)
    name = backend_name(name)
    if name not in DEVICE_BACKENDS:
        return None
    if (reason := reason_against(DEVICE_BACKENDS[name])) is not None:
        raise BackendError(f"backend {name} cannot do this: {reason}; or choose backend='auto'")
    return DEVICE_BACKENDS[name]


def choose_backend(name: str, request: Request, decoding: bool = False) -> Backend:
    """The backend of that name, or for "auto" the first of the table that serves the request.

    A backend asked for by name that cannot serve raises its reason: there is no silent fallback.
    """

    def reason_against(backend: Backend) -> str | None:
        return backend.supports_decoding(request) if decoding else backend.supports(request)

    if name == "auto":
        return next(backend for backend in BACKENDS.values() if reason_against(backend) is None)
    if not isinstance(name, str) or name not in BACKENDS:
        raise unknown_name("backend", name, ["auto", *BACKENDS, *DEVICE_BACKENDS])
    backend = BACKENDS[name]
    if (reason := reason_against(backend)) is not None:
        raise BackendError(f"backend {name} cannot do this: {reason}; choose backend='reference'")
    return backend
