"""What a backend is: it computes a request and makes no choices of its own."""

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
    """The interface that every backend implements. All backends return the same bits."""

    name: str
    takes_tensors: bool
    """True if it takes torch tensors on their device, and never waits for it. False if it takes numpy arrays."""

    def supports(self, request: Request) -> str | None:
        """None if this backend has a kernel for the request, else the reason why not."""

    def supports_decoding(self, request: Request) -> str | None:
        """None if this backend can decode the request, else the reason why not."""

    def quantize(self, x: A, request: Request, amax: A | None = None, out: tuple[A, A] | None = None) -> Parts[A]:
        """Quantize a (rows, K) matrix of the request's dtype. This includes the contract's Hadamard transform.

        amax: float32, one for the tensor or one per row, used instead of the operand's own. out: contiguous (rows, K)
        codes and scales that the backend may write into. The caller must check whether these arrays were returned.
        """

    def dequantize(
        self, parts: Parts[A], shape: tuple[int, int], request: Request, dtype: Any, out: A | None = None
    ) -> A:
        """Decode a (rows, K) matrix by the contract's formula in float32, rounded once to another dtype.

        dtype: of numpy or torch, the same kind as the arrays. out: an array that the backend may write the values into.
        The caller must check whether this array was returned.
        """
