"""Run a program: on a card by the driver, on CPU tensors by Triton's interpreter. Nothing waits."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

from halfbyte.backends.gpu.driver.commands import Address, Program, Slot
from halfbyte.backends.gpu.driver.cuda import check, context_of, encode, entries, function_of, launcher
from halfbyte.backends.gpu.driver.triton_kernels import TYPES, TritonKernel
from halfbyte.backends.gpu.operand import capability_of
from halfbyte.errors import BackendError

if TYPE_CHECKING:
    import torch


def run(program: Program, device: torch.device, slots: dict[Slot, torch.Tensor | int]) -> None:
    """Launch a program's commands on the current stream of a device."""
    if device.type != "cuda":
        interpret(program, slots)
        return
    index = device.index or 0
    values = (_value(slots.get(slot, 0)) for slot in list(Slot)[1:])
    words = bind(program, index)
    check_launch(launcher()(ctypes.addressof(words), stream_of()(index), *values), program)


def bind(program: Program, index: int) -> ctypes.Array[ctypes.c_uint64]:
    """The words that the launcher reads for a device. Who keeps their address must keep them."""
    found = program.words.get(index)
    if found is None:
        architecture = architecture_of(index)
        functions = [function_of(index, architecture, kernel) for kernel in program.kernels()]
        made = encode(program, context_of(index), functions, ctypes.addressof(entries()))
        found = program.words.setdefault(index, made)  # another thread may have been faster
    return found


def architecture_of(index: int) -> str:
    major, minor = capability_of(index)
    return f"sm_{major}{minor}"


def stream_of() -> Callable[[int], int]:
    """A function that gives the handle of a device's current stream: the one that Triton and Inductor call."""
    import torch

    return torch._C._cuda_getCurrentRawStream


def check_launch(status: int, program: Program) -> None:
    if status:
        check(status, f"launching {', '.join(kernel.name for kernel in program.kernels())}")


def _value(given: torch.Tensor | int) -> int:
    return given if isinstance(given, int) else given.data_ptr()


# --- Triton's interpreter ---


def interpret(program: Program, slots: dict[Slot, torch.Tensor | int]) -> None:
    """Run the kernels as numpy on CPU tensors."""
    for command in program.commands:
        kernel = command.kernel
        if not isinstance(kernel, TritonKernel):
            raise BackendError(f"{kernel.name} runs on a card alone")
        arguments = [
            _argument(argument, letter, slots)
            for argument, letter in zip(command.arguments, kernel.letters, strict=True)
        ]
        kernel.interpret(command.grid, arguments)


def _argument(argument: Address | int, letter: str, slots: dict[Slot, torch.Tensor | int]) -> torch.Tensor | int:
    """A number, or a tensor of the type that the kernel expects."""
    if isinstance(argument, int):
        return argument
    held = argument.tensor if argument.slot == Slot.FIXED else slots[argument.slot]
    if letter == "n":
        if not isinstance(held, int):
            raise TypeError("a number was expected, not a tensor")
        return held + argument.offset
    if held is None or isinstance(held, int):
        raise TypeError(f"slot {argument.slot.name} holds no tensor")
    import torch

    names = {"i32": torch.int32, "u8": torch.uint8, "i16": torch.int16, "i64": torch.int64, "fp32": torch.float32}
    wanted = names[TYPES[letter].removeprefix("*")]
    if argument.slot != Slot.FIXED and argument.offset:
        return held.view(-1).view(torch.uint8)[argument.offset :].view(wanted)
    return held if held.dtype == wanted else held.view(wanted)
