"""What a backend is: something that computes a request. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from halfbyte.request import Request

A = TypeVar("A")
"""The arrays of a backend: numpy's, or torch tensors that stay on their device."""


class Reason(str):
    """Why a backend has no kernel for a request: a clause that completes "backend X cannot do this: …"."""


@dataclass(frozen=True)
class Parts(Generic[A]):
    """A quantized (rows, K) matrix: what a backend returns, and what it decodes."""

    codes: A
    scales: A
    stored_scale: A | None
    global_scale: A | None = None
    """What code × scale is multiplied by. Decoding does not look at it: it follows from the stored scale."""


class Backend(Protocol[A]):
    """The plug point for engines. All of them return the same bits."""

    name: str
    takes_tensors: bool
    """Whether it takes torch tensors where they lie, without waiting for their device; otherwise numpy arrays."""

    def supports(self, request: Request) -> str | None:
        """None if this backend has a kernel for the request, else the reason why not."""

    def supports_decoding(self, request: Request) -> str | None:
        """The same for dequantize."""

    def quantize(self, x: A, request: Request, amax: A | None = None, out: tuple[A, A] | None = None) -> Parts[A]:
        """Quantize a (rows, K) matrix of the request's dtype, the contract's Hadamard transform included.

        amax: float32, one for the tensor or one per row, in place of the operand's own. out: contiguous (rows, K) codes
        and scales that may be written into; the caller looks whether they are what came back.
        """

    def dequantize(
        self, parts: Parts[A], shape: tuple[int, int], request: Request, dtype: Any, out: A | None = None
    ) -> A:
        """Decode a (rows, K) matrix by the contract's formula in float32, rounded once to another dtype.

        dtype: numpy's or torch's, as the arrays are. out: where the values may go; the caller looks whether it is what
        came back.
        """
