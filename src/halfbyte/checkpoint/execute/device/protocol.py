"""What a conversion asks of a device. Work is queued and done later, in order; only `Event.wait` waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from halfbyte.backends.headroom import Trial
from halfbyte.checkpoint.io.decode import RowScales
from halfbyte.checkpoint.io.views import SourceMatrix
from halfbyte.codec.bits import U8

Memory: TypeAlias = Any
"""Bytes on a device, in one dimension: slices of it are memory too."""


STAGED = 4 << 20
"""Bytes of pinned memory on the host through which a stream reads files."""


class DeviceMemoryError(Exception):
    """A device has no memory left for what was asked. Nothing was queued."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """Values of a source on a device."""

    memory: Memory
    dtype: np.dtype[Any]
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """Rows of a source on a device, before they are decoded."""

    source: SourceMatrix
    raw: Memory
    scales: Memory
    """The bytes of `rows.array`."""
    rows: RowScales


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Wait until all that was queued before this point is done. Raises if some of it failed."""


class Stream(Protocol):
    """A queue of work on one device. What is queued runs in order; other streams run at the same time."""

    def begin(self) -> None:
        """Called by a thread before it queues work here."""

    def upload(self, host: npt.NDArray[Any], memory: Memory) -> None:
        """Copy a contiguous array to the device. It must not change until that is done."""

    def fill(
        self, file: int, offset: int, memory: Memory, dtype: np.dtype[Any] | None
    ) -> tuple[int, np.float32 | None]:
        """Read an open file straight into memory of the device.

        Returns the bytes that the file had, and the largest magnitude if a dtype is given and it was found on the way.
        """

    def download(self, memory: Memory, host: npt.NDArray[Any]) -> None:
        """Copy to a contiguous array on the host."""

    def decode(self, encoded: Encoded, out: Memory) -> None:
        """The float32 values of encoded rows."""

    def amax(self, matrix: Matrix, into: Memory) -> None:
        """The largest magnitude, NaN if there is one, as a float32 in four bytes."""

    def survey(self, matrix: Matrix, amax: np.float32, tried: tuple[Trial, int], scratch: Memory, into: Memory) -> None:
        """What each candidate for the headroom of `amax` costs, up to a number that all share (backends/headroom.py).

        tried: headrooms and blocks, and how many rows of the tensor come before these. into: WORDS int64 for each
        candidate, which stand for 32 bits each. scratch: as many bytes as the codes have.
        """

    def quantize(self, matrix: Matrix, amax: np.float32 | None, codes: Memory, scales: Memory) -> None:
        """Packed codes and scale bytes; `amax`: of all that share a tensor scale."""

    def record(self) -> Event:
        """The point after all that was queued so far."""

    def close(self) -> None:
        """Give back what the stream holds on the host. Nothing is queued any more."""


class Device(Protocol):
    """A GPU."""

    name: str

    def free(self) -> int:
        """Bytes of memory that nobody uses."""

    def allocate(self, size: int) -> Memory:
        """Memory that is given back when nobody refers to it. Raises DeviceMemoryError."""

    def stream(self) -> Stream: ...

    def pin(self, memory: U8) -> None:
        """Make host memory such that copies to and from it need no help of the CPU. `unpin` undoes it."""

    def unpin(self, memory: U8) -> None: ...
