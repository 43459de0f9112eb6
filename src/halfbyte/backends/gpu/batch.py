"""Several tensors in one launch: their amaxes, quantization with one scale each or one for several; MXFP4's cast."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.gpu.backend import tensor_numbers
from halfbyte.backends.gpu.choose import choose
from halfbyte.backends.gpu.constants import LISTED, MOST_PARTS
from halfbyte.backends.gpu.cuda.table_kernels import setting
from halfbyte.backends.gpu.dispatch import (
    AMAX_CHUNK,
    AMAX_DEPTH,
    AMAX_PROGRAMS,
    OWN,
    TENSOR,
    amax_command,
    amax_constants,
    block_commands,
    prepare_command,
)
from halfbyte.backends.gpu.driver.commands import Address, Command, Program, Slot
from halfbyte.backends.gpu.driver.run import run
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.launch import (
    CODES,
    SCALES,
    SEARCH_LANES,
    SEARCHES,
    Launch,
    Matrix,
    Source,
    X,
    weighs_columns,
)
from halfbyte.backends.gpu.operand import LANES, check_device, dtype_name_of, on_device, row_quads
from halfbyte.backends.gpu.small import Small
from halfbyte.backends.gpu.survey import survey_of
from halfbyte.backends.headroom import ALONE, Trial, headrooms, probe
from halfbyte.backends.protocol import Parts, Reason
from halfbyte.codec.blocks import ceil_div
from halfbyte.contracts import NVFP4Rule
from halfbyte.errors import BackendError, InputError
from halfbyte.request import Request

if TYPE_CHECKING:
    import torch


HINTED = 1 << 27
"""Bytes of codes below which hints to the cache make a cast faster: 4 % for 48 MiB, but 6 % slower for 336."""

TABLE_COLUMNS = 3
"""Numbers per tensor in the table of blocks. The table for the amaxes follows it."""


def check_list(tensors: list[torch.Tensor], block: int) -> None:
    """Refuse lists that one launch cannot take, naming the tensor."""
    if not tensors:
        raise InputError("no tensors: give at least one")
    first = tensors[0]
    check_device(first)
    for index, x in enumerate(tensors):
        problem = None
        if x.device != first.device or x.dtype != first.dtype:
            problem = f"is {x.dtype} on {x.device}, but tensor 0 is {first.dtype} on {first.device}"
        elif x.ndim < 1 or x.numel() == 0 or x.shape[-1] % block:
            problem = f"needs a last axis that is a multiple of {block}"
        elif not x.is_contiguous() or x.data_ptr() % 16:
            problem = "must be contiguous and start at a multiple of 16 bytes; call .contiguous() or .clone()"
        if problem:
            raise InputError(f"tensor {index} of shape {tuple(x.shape)} {problem}")


# --- amaxes ---


def list_amaxes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """float32 bits (int32) of the largest magnitude of each tensor."""
    import torch

    first = tensors[0]
    listed = Listed(tuple(x.numel() for x in tensors), dtype_name_of(first.dtype), first.device)
    command, parts = listed.amax(X, CODES)
    out = torch.empty(len(tensors), parts, dtype=torch.int32, device=first.device)
    addresses = tuple(x.data_ptr() for x in tensors)
    table = _tables_on(first.device).table(addresses, lambda: listed.amax_rows(addresses))
    run(Program((command,)), first.device, {Slot.X: table, Slot.CODES: out})
    return out.amax(dim=1)


def group_amaxes(x: torch.Tensor, group_rows: int) -> torch.Tensor:
    """float32 amaxes of every `group_rows` rows of a matrix."""
    import torch

    with on_device(x):
        matrix = Matrix(x.shape[0], x.shape[1], row_quads(x), x.is_contiguous())
        command, parts = amax_command(matrix, dtype_name_of(x.dtype), group_rows, CODES)
        out = torch.empty(x.shape[0] // group_rows, parts, dtype=torch.int32, device=x.device)
        run(Program((command,)), x.device, {Slot.X: x, Slot.CODES: out})
        return out.amax(dim=1).view(torch.float32)


@dataclass(frozen=True)
class Listed:
    """Separate tensors of one dtype: how many elements each has."""

    sizes: tuple[int, ...]
    dtype: str
    device: torch.device

    def amax_rows(self, addresses: Sequence[int]) -> npt.NDArray[np.int64]:
        """The table for the amaxes: address, and length in units of sixteen bytes."""
        per_quad = 4 if self.dtype == "fp32" else 8
        return np.stack([np.array(addresses, np.int64), np.array(self.sizes, np.int64) // per_quad], axis=1)

    def amax(self, table: Address, out: Address) -> tuple[Command, int]:
        """Partial amaxes of each tensor, and how many each has."""
        words = max(self.sizes) // (1 if self.dtype == "fp32" else 2)
        count = len(self.sizes)
        programs = max(1, min(ceil_div(words, AMAX_CHUNK * AMAX_DEPTH), ceil_div(AMAX_PROGRAMS, count)))
        kernel = triton_kernel("scales.amax_listed", amax_constants(self.dtype), 8)
        return Command(kernel, (count * programs, 1), (table, out, programs)), programs


class AddressTables:
    """Tables on a device that begin with addresses, by these addresses. Nothing waits for a table to arrive.

    A table is copied from pinned memory on the current stream. Calls on other streams wait for it on the device. In a
    graph that is captured, which begins with everything done, they need not; a table that is made there is kept for
    ever, with the memory it is copied from, because the graph copies it again whenever it is replayed.
    """

    MOST = 32

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._found: dict[tuple[int, ...], tuple[torch.Tensor, int, Any]] = {}
        self._captured: list[tuple[torch.Tensor, torch.Tensor]] = []

    def table(self, addresses: tuple[int, ...], make: Callable[[], npt.NDArray[np.int64]]) -> torch.Tensor:
        import torch

        if self.device.type != "cuda":
            return torch.from_numpy(make())
        stream = torch.cuda.current_stream(self.device)
        found = self._found.get(addresses)
        if found is None:
            return self._copied(addresses, make(), stream)
        table, handle, arrived = found
        if stream.cuda_stream != handle and not torch.cuda.is_current_stream_capturing():
            stream.wait_event(arrived)
        return table

    def _copied(self, addresses: tuple[int, ...], rows: npt.NDArray[np.int64], stream: Any) -> torch.Tensor:
        import torch

        host = torch.from_numpy(rows).pin_memory()
        table = host.to(self.device, non_blocking=True)
        if torch.cuda.is_current_stream_capturing():
            self._captured.append((table, host))
            return table
        if len(self._found) >= self.MOST:
            self._found.clear()
        self._found[addresses] = table, stream.cuda_stream, stream.record_event()
        return table


@functools.cache
def _tables_on(device: torch.device) -> AddressTables:
    """The tables of amaxes alone."""
    return AddressTables(device)


# --- quantization ---


Tried = tuple[tuple[float, ...], Trial | None]
"""The candidates for a headroom, and what decides whether there are more."""


class ListQuantizer:
    """Quantizes separate tensors of given sizes together. Made once, it serves every list of these sizes.

    share: so many tensors that follow each other have one tensor-level scale, of their largest amax. repairs: zero and
    tiny amaxes are raised to the next usable one. All scales must have the same candidates for their headroom.
    """

    def __init__(self, listed: Listed, request: Request, share: int = 1, repairs: bool = False) -> None:
        kernel = choose(request)
        if isinstance(kernel, Reason):
            raise BackendError(f"backend gpu cannot do this: {kernel}")
        in_rows = isinstance(kernel.rule, NVFP4Rule) and request.tile[0] == 1
        if not in_rows or weighs_columns(request.method) or request.contract.transform.hadamard:
            raise InputError(
                "lists are quantized to NVFP4 in blocks of one row, without weights or a transform; give a 3-D tensor "
                "instead"
            )
        self.listed, self.request, self.kernel, self.share = listed, request, kernel, share
        block, count = request.format.block, len(listed.sizes)
        self.blocks = [size // block for size in listed.sizes]
        self.before = list(itertools.accumulate(self.blocks, initial=0))
        lanes = SEARCH_LANES if kernel.family in SEARCHES else LANES
        programs = ceil_div(max(self.blocks), lanes)
        source = Source(LISTED, count, lanes, programs, 1, 0, programs * count, self.before[-1])
        launch = Launch(kernel, request, source, listed.device)
        self.at_once = True
        """Whether the program finds the amaxes itself."""
        ((headroom, trial),) = candidates_of_list(listed.sizes, request, share)
        if headroom != ALONE:
            survey = survey_of(launch, headroom, trial, share, repairs)
            self.small, first = survey.small, survey.commands()
        else:
            first = self._scales(share, repairs)
        commands, table_bytes = block_commands(launch)
        self.program = Program((*first, *commands), self.small.floats, table_bytes)

        self._tables = AddressTables(listed.device)

    def _scales(self, share: int, repairs: bool) -> list[Command]:
        """Tensor-level numbers from the amaxes; if one program cannot read all parts of an amax, from given ones."""
        count = len(self.listed.sizes)
        behind = Address(Slot.X, 8 * TABLE_COLUMNS * count)
        amax, parts = self.listed.amax(behind, Small(count).address(Small(count).partial))
        self.at_once = parts * share <= MOST_PARTS
        if self.at_once:
            self.small = Small(count, count * parts)
            return [amax, prepare_command(self.kernel, self.small, OWN, parts * share, share, repairs)]
        self.small = Small(count)
        return [prepare_command(self.kernel, self.small, TENSOR, repairs=repairs)]

    def rows(self, addresses: Sequence[int]) -> npt.NDArray[np.int64]:
        """The table of blocks (address, blocks, blocks before), and behind it the one for the amaxes."""
        columns = (addresses, self.blocks, self.before[:-1])
        blocks = np.stack([np.array(column, np.int64) for column in columns], axis=1)
        return np.concatenate([blocks.reshape(-1), self.listed.amax_rows(addresses).reshape(-1)])

    def __call__(self, tensors: Sequence[torch.Tensor], addresses: tuple[int, ...]) -> Parts[torch.Tensor]:
        """Codes and scales of the tensors, which follow each other in two flat arrays."""
        import torch

        device, program, blocks = self.listed.device, self.program, self.before[-1]
        table = self._tables.table(addresses, lambda: self.rows(addresses))
        given = 0 if self.at_once else self._shared_amaxes(tensors)
        codes = torch.empty(blocks * self.request.format.block // 2, dtype=torch.uint8, device=device)
        scales = torch.empty(blocks, dtype=torch.uint8, device=device)
        small = torch.empty(program.small_floats, dtype=torch.float32, device=device)
        tables = torch.empty(program.table_bytes, dtype=torch.uint8, device=device)
        run(program, device, {
            Slot.X: table, Slot.GIVEN: given, Slot.CODES: codes, Slot.SCALES: scales, Slot.SMALL: small,
            Slot.TABLES: tables,
        })  # fmt: skip
        stored, multiplier = tensor_numbers(self.kernel, self.small, small)
        return Parts(codes, scales, stored, multiplier)

    def _shared_amaxes(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """float32 bits of each tensor's amax, which it has in common with those that share it."""
        return list_amaxes(list(tensors)).view(-1, self.share).amax(dim=1).repeat_interleave(self.share)


def quantize_list(tensors: list[torch.Tensor], request: Request, share: int = 1) -> Parts[torch.Tensor]:
    """Quantize separate tensors in one launch. Their codes and scales follow each other in two flat arrays.

    Where small and large tensors have different candidates for their headroom, there is a launch for each kind.
    """
    check_list(tensors, request.format.block)
    sizes = tuple(x.numel() for x in tensors)
    with on_device(tensors[0]):
        kinds = list(candidates_of_list(sizes, request, share).values())
        made = [_quantize_some([tensors[at] for at in members], request, share) for members in kinds]
        return made[0] if len(kinds) == 1 else _in_order(made, kinds, sizes, request.format.block)


def candidates_of_list(sizes: Sequence[int], request: Request, share: int) -> dict[Tried, list[int]]:
    """The candidates for the headroom of scales, and the tensors that have them; `share` tensors have one scale."""
    found: dict[Tried, list[int]] = {}
    for at in range(0, len(sizes), share):
        size = sum(sizes[at : at + share])
        found.setdefault((headrooms(request, size), probe(request, size)), []).extend(
            range(at, min(at + share, len(sizes)))
        )
    return found


def _quantize_some(tensors: list[torch.Tensor], request: Request, share: int) -> Parts[torch.Tensor]:
    listed = Listed(tuple(x.numel() for x in tensors), request.dtype, tensors[0].device)
    return _list_quantizer(listed, request, share)(tensors, tuple(x.data_ptr() for x in tensors))


def _in_order(
    made: list[Parts[torch.Tensor]], kinds: list[list[int]], sizes: Sequence[int], block: int
) -> Parts[torch.Tensor]:
    """The parts of several launches in the order of the tensors."""
    import torch

    places = sorted((at, kind, index) for kind, members in enumerate(kinds) for index, at in enumerate(members))

    def joined(flat: list[torch.Tensor | None], per: Callable[[int], int]) -> torch.Tensor | None:
        cut = []
        for part, members in zip(flat, kinds, strict=True):
            if part is None:
                return None
            cut.append(torch.split(part, [per(sizes[at]) for at in members]))
        return torch.cat([cut[kind][index] for _, kind, index in places])

    codes = joined([parts.codes for parts in made], lambda size: size // 2)
    scales = joined([parts.scales for parts in made], lambda size: size // block)
    if codes is None or scales is None:
        raise TypeError("there are always codes and scales")
    stored = joined([parts.stored_scale for parts in made], lambda size: 1)
    return Parts(codes, scales, stored, joined([parts.global_scale for parts in made], lambda size: 1))


def _list_quantizer(listed: Listed, request: Request, share: int) -> ListQuantizer:
    """Kept, so that lists of the same sizes find their tables again."""
    key = (listed, request, share, setting())
    try:
        found = _QUANTIZERS.get(key)
    except TypeError:  # a contract made by hand may hold options that cannot be hashed
        return ListQuantizer(listed, request, share)
    if found is None:
        found = ListQuantizer(listed, request, share)
        if len(_QUANTIZERS) >= MOST_QUANTIZERS:
            _QUANTIZERS.clear()
        _QUANTIZERS[key] = found
    return found


MOST_QUANTIZERS = 64
_QUANTIZERS: dict[object, ListQuantizer] = {}


# --- the cast ---


def cast_scales(
    codes: torch.Tensor, scales: torch.Tensor, anchor: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXFP4 codes and E8M0 bytes as NVFP4 codes and E4M3 bytes of 2**(byte − anchor), each standing for two blocks.

    The third tensor counts scales beyond E4M3's range: too large (written as 448), too small (written as 0).
    """
    import torch

    check_device(codes)
    blocks = scales.numel()
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or codes.numel() != 16 * blocks:
        raise InputError(f"MXFP4 has sixteen bytes of codes per scale, not {codes.numel()} for {blocks}")
    with on_device(codes):
        codes, scales = codes.contiguous(), scales.contiguous()
        codes = codes if codes.data_ptr() % 16 == 0 else codes.clone()
        out = torch.empty_like(codes)
        out_scales = torch.empty((*scales.shape[:-1], 2 * scales.shape[-1]), dtype=torch.uint8, device=codes.device)
        outside = torch.zeros(2, dtype=torch.int32, device=codes.device)
        constants = {"B": 2 * LANES, "HINTS": codes.numel() < HINTED}
        kernel = triton_kernel("decode.cast_mxfp4_to_nvfp4", constants, 4, fused=True)
        arguments = (X, Address(Slot.GIVEN), CODES, SCALES, Address(Slot.SMALL), anchor, blocks)
        program = Program((Command(kernel, (ceil_div(blocks, 2 * LANES), 1), arguments),))
        run(program, codes.device, {
            Slot.X: codes, Slot.GIVEN: scales, Slot.CODES: out, Slot.SCALES: out_scales, Slot.SMALL: outside,
        })  # fmt: skip
    return out, out_scales, outside
