"""Commands of the choice of headroom: amaxes, what each candidate makes of them, the survey, which also decides.

Nothing waits, and nothing outlives the call: totals are in slot SMALL, and what is known of each block lies in the
memory of the codes, which are written later.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from halfbyte.backends.gpu.constants import LISTED, UNIFORM, WEIGHTED, Constants
from halfbyte.backends.gpu.driver.commands import Address, Arguments, Command, Slot, fixed
from halfbyte.backends.gpu.driver.triton_kernels import triton_kernel
from halfbyte.backends.gpu.exact_search import weights_on
from halfbyte.backends.gpu.launch import SEARCH_LANES, Launch, X
from halfbyte.backends.gpu.small import Small
from halfbyte.backends.headroom import DEFAULT
from halfbyte.codec.blocks import ceil_div
from halfbyte.methods import Optimal

if TYPE_CHECKING:
    import torch

HALF = 2
"""Bytes of what is noted of a block."""

AMAX_LANES, AMAX_DEPTH, AMAX_PROGRAMS = 256, 2, 1056
"""Blocks per step, steps per turn, and programs that fill a card."""

FEW_BLOCKS = 1 << 16
"""Up to so many blocks a program takes one warp of them, so that none takes longer than a search."""

LARGE_TILE = 1024
MOST_TILES = 64
"""Tiles of a program, whose blocks are numbered by sixteen bits."""

PROGRAMS = {True: 2048, False: 8192}
"""Programs per candidate, by whether only some blocks are searched."""


@dataclass(frozen=True)
class Survey:
    """The choice of headroom for the blocks of a launch."""

    launch: Launch
    headroom: tuple[float, ...]
    """The candidates, ascending. (backends/headroom.py)"""
    share: int = 1
    """So many groups that follow each other have one scale."""
    repairs: bool = False
    """Whether zero and tiny amaxes are raised to the next usable one."""

    @property
    def weighted(self) -> bool:
        method = self.launch.request.method
        return isinstance(method, Optimal) and method.weights is not None

    @property
    def some(self) -> bool:
        """Whether the totals of two candidates differ by some of the blocks only."""
        return self.headroom == DEFAULT and not self.weighted

    @property
    def competes(self) -> bool:
        """Whether 1 is among the candidates; where not, it is taken if they leave the range of float32."""
        return self.headroom[0] == 1

    @property
    def tried(self) -> tuple[float, ...]:
        """The candidates, behind 1, whose multiplier has the unit of all errors."""
        return self.headroom if self.competes else (1.0, *self.headroom)

    @property
    def group_blocks(self) -> int:
        """Blocks of the largest group, or a few more."""
        source = self.launch.source
        return source.blocks * self.launch.lanes if source.map == LISTED else source.group_blocks

    @property
    def all_blocks(self) -> int:
        source = self.launch.source
        return source.blocks if source.all_blocks is None else source.all_blocks

    @property
    def amax_parts(self) -> int:
        """Partial amaxes of each group."""
        steps = ceil_div(self.group_blocks, AMAX_LANES * AMAX_DEPTH)
        return max(1, min(steps, ceil_div(AMAX_PROGRAMS, self.launch.source.groups)))

    @property
    def small(self) -> Small:
        groups = self.launch.source.groups
        return Small(groups, groups * self.amax_parts, groups // self.share, len(self.tried))

    def commands(self, given: Address | None = None, decides: bool = True) -> list[Command]:
        """Amaxes, candidates and survey. given: the bits of an amax, in place of the operand's own.

        decides: whether the numbers of the best candidate are written, as `prepare` writes them for one amax.
        """
        return [self._amaxes(), self._candidates(given), self._survey(decides)]

    def _amaxes(self) -> Command:
        chosen, source, small = self.launch.kernel.constants, self.launch.source, self.small
        constants: Constants = {
            "B": AMAX_LANES, "DEPTH": AMAX_DEPTH, "N": chosen["N"], "DTYPE": chosen["DTYPE"], "MAP": source.map,
        }  # fmt: skip
        arguments = (
            X, small.address(small.partial), small.address(small.least), Address(Slot.CODES), source.columns,
            source.row_quads, self.group_blocks, self.amax_parts,
        )  # fmt: skip
        kernel = triton_kernel("survey.amax_blocks", constants, AMAX_LANES // 32)
        return Command(kernel, (source.groups * self.amax_parts, 1), arguments)

    def _candidates(self, given: Address | None) -> Command:
        small = self.small
        constants: Constants = {
            **self.launch.kernel.prepare, "COUNT": small.candidates, "GIVEN": given is not None,
            "REPAIRS": self.repairs,
        }  # fmt: skip
        written = (
            small.candidate_numbers,
            small.candidate_stored,
            small.candidate_multiplier,
            small.totals,
            small.done,
            small.lowest,
        )
        arguments = (
            small.address(small.partial), small.address(small.least),
            fixed(headroom_on(self.tried, str(self.launch.device))), *(small.address(place) for place in written),
            self.amax_parts * self.share, 0 if given is None else given,
        )  # fmt: skip
        kernel = triton_kernel("survey.prepare_candidates", constants, 4)
        return Command(kernel, (small.scales * small.candidates, 1), arguments)

    def _survey(self, decides: bool) -> Command:
        launch, source, small, some = self.launch, self.launch.source, self.small, self.some
        method, chosen = launch.request.method, launch.kernel.constants
        weights = fixed(weights_on(method, launch)) if self.weighted and isinstance(method, Optimal) else X
        names = ("N", "DTYPE", "FIRST", "ELEMENT", "TIE", "SIGN", "NAN_CODE", "ZERO_INPUT", "WRAPS")
        tile = LARGE_TILE if some and self.all_blocks > FEW_BLOCKS else SEARCH_LANES
        steps = ceil_div(self.group_blocks, tile)
        tiles = min(MOST_TILES, ceil_div(steps, ceil_div(PROGRAMS[some], source.groups)))
        parts = ceil_div(steps, tiles)
        if len(self.headroom) == 1:  # nothing to compare
            tiles, parts = 0, 1
        constants: Constants = {
            "B": SEARCH_LANES, "TILE": tile, "MAP": source.map, "SHORT": launch.kernel.short,
            "OBJECTIVE": WEIGHTED if self.weighted else UNIFORM, "COUNT": small.candidates,
            "COMPETES": self.competes, "SOME": some, "DECIDES": decides,
            "STORED": launch.kernel.prepare["STORED"], **{name: chosen[name] for name in names},
        }  # fmt: skip
        read = (
            small.candidate_numbers, small.candidate_stored, small.candidate_multiplier, small.totals, small.done,
            small.lowest,
        )  # fmt: skip
        written = (0, small.stored, small.multiplier)
        programs = parts * self.share * small.candidates
        arguments: Arguments = (
            X, weights, Address(Slot.CODES), Address(Slot.CODES, HALF * self.all_blocks),
            *(small.address(place) for place in (*read, *written)),
            source.columns, source.row_quads, self.group_blocks, parts, tiles, self.share, programs, self.all_blocks,
        )  # fmt: skip
        kernel = triton_kernel("survey.survey", constants, SEARCH_LANES // 32)
        return Command(kernel, (source.groups * parts, small.candidates), arguments)


@functools.lru_cache(maxsize=64)
def headroom_on(headroom: tuple[float, ...], device: str) -> torch.Tensor:
    """The bits of the candidates, as float64, on a device."""
    import torch

    return torch.from_numpy(np.array(headroom, np.float64).view(np.int64)).to(device)
