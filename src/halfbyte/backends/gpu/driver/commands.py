"""What to launch, apart from where the tensors are: a list of commands serves every call of one kind and shape.

An argument of a kernel is a number, or an address within one of a call's tensors: slot and offset. So the commands, and
the words that the launcher reads, are made once. A call only says what its slots hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Slot(IntEnum):
    """What a call fills in. FIXED holds 0: numbers and tensors that outlive the call."""

    FIXED = 0
    X = 1
    CODES = 2
    SCALES = 3
    SMALL = 4
    """Tensor-level numbers, and partial maxima on the way to them."""
    GIVEN = 5
    """A given amax: the address of a tensor, or the bits of a float32."""
    TABLES = 6


@dataclass(frozen=True, eq=False)
class Address:
    """A place in a tensor of the call; or, with the slot FIXED, a tensor that is always the same."""

    slot: Slot
    offset: int = 0
    tensor: torch.Tensor | None = None
    """FIXED: the tensor, so that it lives as long as the commands."""


Arguments = tuple[Address | int, ...]


def fixed(tensor: torch.Tensor) -> Address:
    """The address of a tensor that outlives the call."""
    return Address(Slot.FIXED, tensor.data_ptr(), tensor)


@dataclass(frozen=True)
class Image:
    """A compiled kernel, ready for the driver."""

    code: bytes
    name: str
    threads: int
    shared: int
    """Bytes of dynamic shared memory."""
    words: int
    """Parameters, of eight bytes each. Those after the arguments of a command are zero."""


class Kernel(Protocol):
    """Anything that can be compiled to an image. Equal kernels have equal images."""

    @property
    def name(self) -> str: ...

    def image(self, architecture: str) -> Image:
        """The image for "sm_90" and the like, from the cache or compiled."""

    def interpret(self, grid: tuple[int, int], arguments: list[torch.Tensor | int]) -> None:
        """Run it on CPU tensors, by Triton's interpreter."""


@dataclass(frozen=True)
class Command:
    """One launch."""

    kernel: Kernel
    grid: tuple[int, int]
    arguments: Arguments
    overlaps: bool = False
    """Whether it may start while the one before is still running. (programmatic dependent launch)"""


@dataclass(frozen=True, eq=False)
class Program:
    """Commands in order, and the memory that a call must bring."""

    commands: tuple[Command, ...]
    small_floats: int = 0
    """Float32 numbers in slot SMALL."""
    table_bytes: int = 0
    """Bytes in slot TABLES."""
    words: dict[int, ctypes.Array[ctypes.c_uint64]] = field(default_factory=dict)
    """By device: what the launcher reads, made when the program first runs there. (driver/run.py)"""

    def kernels(self) -> Iterable[Kernel]:
        return (command.kernel for command in self.commands)
