"""What a backend is: something that computes a request. It decides nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from halfbyte.codec.bits import F32, U8
from halfbyte.contracts import Contract
from halfbyte.contracts.spec import Scaling, Tile
from halfbyte.formats import BlockFormat
from halfbyte.methods import Method

if TYPE_CHECKING:
    import torch


class Reason(str):
    """Why a backend has no kernel for a request: a clause that completes "backend X cannot do this: …"."""


@dataclass(frozen=True)
class Request:
    """One quantization, checked and with every default filled in."""

    format: BlockFormat
    contract: Contract
    method: Method
    tile: Tile
    scaling: Scaling
    dtype: str
    """Short name of the operand's dtype; statistics may be held in it."""
    global_amax: F32 | None = None
    """Given in place of the operand's own amax: shape () or (rows,)."""
    out: tuple[U8, U8] | None = None
    """Contiguous (rows, K) codes and scales to write into, where the backend can; it may return others instead."""
    threads: int | None = None
    """How many threads may work; None: the backend's own choice. Never changes a bit."""
    device: str = "numpy"
    """Where the operand lies: "numpy", or the type of a torch tensor's device ("cpu", "cuda")."""


@dataclass(frozen=True)
class Parts:
    """What a backend returns: arrays of the request's logical (rows, K) matrix."""

    codes: U8
    scales: U8
    stored_scale: F32 | None
    global_scale: F32 | None


class Backend(Protocol):
    """The plug point for engines. All of them return the same bits."""

    name: str

    def supports(self, request: Request) -> str | None:
        """None if this backend can quantize the request, else the reason why not."""

    def supports_decoding(self, request: Request) -> str | None:
        """The same for dequantize."""

    def quantize(self, x: npt.NDArray[np.generic], request: Request) -> Parts:
        """Quantize a (rows, K) matrix of the request's dtype."""

    def dequantize(
        self,
        codes: U8,
        scales: U8,
        stored_scale: F32 | None,
        shape: tuple[int, int],
        request: Request,
        dtype: np.dtype[np.generic],
        out: npt.NDArray[Any] | None = None,
    ) -> npt.NDArray[Any]:
        """Decode a (rows, K) matrix by the contract's formula in float32, rounded once to another dtype.

        out: where the values may go; the caller looks whether it is what came back.
        """


@dataclass(frozen=True)
class DeviceParts:
    """What a device backend returns: tensors on the operand's device."""

    codes: torch.Tensor
    scales: torch.Tensor
    stored_scale: torch.Tensor | None
    global_scale: torch.Tensor | None


class DeviceBackend(Protocol):
    """The plug point for engines that take tensors where they lie and return them there, without waiting."""

    name: str

    def supports(self, request: Request) -> str | None:
        """None if this backend can quantize the request, else the reason why not."""

    def supports_decoding(self, request: Request) -> str | None:
        """The same for dequantize."""

    def quantize(
        self,
        x: torch.Tensor,
        request: Request,
        amax: torch.Tensor | None = None,
        out: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> DeviceParts:
        """Quantize a (rows, K) matrix; `amax`: one for the tensor or one a row, in place of the operand's own."""

    def dequantize(
        self,
        codes: torch.Tensor,
        scales: torch.Tensor,
        stored_scale: torch.Tensor | None,
        shape: tuple[int, int],
        request: Request,
        dtype: torch.dtype,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Decode a (rows, K) matrix, into `out` if given."""
