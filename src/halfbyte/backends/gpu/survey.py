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
from halfbyte.backends.headroom import CLEARLY, DEFAULT, Trial
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
class Mode:
    """How the survey kernel is launched."""

    some: bool
    """Whether the totals of two candidates differ by some of the blocks only, which alone are searched."""
    decides: bool
    """Whether the best candidate's numbers are written; otherwise the totals are all that is wanted."""
    step: int = 1
    """Every such block counts."""
    probed: bool = False
    """Whether the totals of a sample tell which candidates count."""


@dataclass(frozen=True)
class Survey:
    """The choice of headroom for the blocks of a launch."""

    launch: Launch
    headroom: tuple[float, ...]
    """The candidates, ascending, with those that a probe may find. (backends/headroom.py)"""
    share: int = 1
    """So many groups that follow each other have one scale."""
    repairs: bool = False
    """Whether zero and tiny amaxes are raised to the next usable one."""
    probe: Trial | None = None
    """The trial that decides whether candidates besides 1 and 2 count."""

    @property
    def weighted(self) -> bool:
        method = self.launch.request.method
        return isinstance(method, Optimal) and method.weights is not None

    @property
    def some(self) -> bool:
        """Whether the totals of two candidates differ by some of the blocks only."""
        return (self.headroom == DEFAULT or self.probe is not None) and not self.weighted

    @property
    def two(self) -> int:
        """The place of the headroom 2; -1 if it is not a candidate."""
        return self.tried.index(2.0) if 2.0 in self.tried else -1

    @property
    def by_row(self) -> bool:
        """Whether every group is a row of one tensor, whose sample is made of rows."""
        return self.launch.request.scaling == "row" and self.launch.source.map != LISTED

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
        scales = groups // self.share
        samples = 0 if self.probe is None else 1 if self.by_row else scales
        return Small(groups, groups * self.amax_parts, scales, len(self.tried), samples)

    def commands(self) -> list[Command]:
        """Amaxes, candidates, the sample if there is a probe, and the survey.

        The numbers of the best candidate are written, as `prepare` writes them for one amax.
        """
        first = [self._amaxes(), self._candidates(None)]
        if self.probe is None:
            return [*first, self._survey(Mode(self.some, True))]
        sample = Mode(some=False, decides=False, step=self.probe.step)
        return [*first, self._survey(sample), self._survey(Mode(self.some, True, probed=True))]

    def totals_of(self, amax: Address, step: int) -> list[Command]:
        """Amaxes, candidates and totals under an amax that is given by its bits.

        step: the totals of a sample, whose first block is in slot SCALES; 1: those of every block.
        """
        first = [self._amaxes(), self._candidates(amax)]
        return [*first, self._survey(Mode(self.some and step == 1, False, step))]

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
            "REPAIRS": self.repairs, "SAMPLES": 0 if self.probe is None else 1 if self.by_row else 2,
        }  # fmt: skip
        written = (
            small.candidate_numbers,
            small.candidate_stored,
            small.candidate_multiplier,
            small.totals,
            small.sampled,
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

    def _survey(self, mode: Mode) -> Command:
        launch, source, small = self.launch, self.launch.source, self.small
        method, chosen = launch.request.method, launch.kernel.constants
        weights = fixed(weights_on(method, launch)) if self.weighted and isinstance(method, Optimal) else X
        names = ("N", "DTYPE", "FIRST", "ELEMENT", "TIE", "SIGN", "NAN_CODE", "ZERO_INPUT", "WRAPS")
        tile = LARGE_TILE if mode.some and self.all_blocks > FEW_BLOCKS else SEARCH_LANES
        rows = self.by_row and mode.step > 1  # then a group is in the sample with all of its blocks, or not at all
        blocks = self.group_blocks if rows else ceil_div(self.group_blocks, mode.step)
        groups = ceil_div(source.groups, mode.step) if rows else source.groups
        steps = ceil_div(blocks, tile)
        tiles = min(MOST_TILES, ceil_div(steps, ceil_div(PROGRAMS[mode.some], groups)))
        parts = ceil_div(steps, tiles)
        if len(self.headroom) == 1:  # nothing to compare
            tiles, parts = 0, 1
        constants: Constants = {
            "B": SEARCH_LANES, "TILE": tile, "MAP": source.map, "SHORT": launch.kernel.short,
            "OBJECTIVE": WEIGHTED if self.weighted else UNIFORM, "COUNT": small.candidates,
            "COMPETES": self.competes, "SOME": mode.some, "DECIDES": mode.decides, "SAMPLE": mode.step > 1,
            "BY_ROW": self.by_row, "PROBED": mode.probed, "TWO": self.two, "LESS": CLEARLY[0], "OF": CLEARLY[1],
            "STORED": launch.kernel.prepare["STORED"], **{name: chosen[name] for name in names},
        }  # fmt: skip
        totals = small.sampled if mode.step > 1 and self.probe is not None else small.totals
        read = (
            small.candidate_numbers, small.candidate_stored, small.candidate_multiplier, totals, small.sampled,
            small.done, small.lowest,
        )  # fmt: skip
        written = (0, small.stored, small.multiplier)
        programs = parts * self.share * small.candidates
        arguments: Arguments = (
            X, weights, Address(Slot.CODES), Address(Slot.CODES, HALF * self.all_blocks),
            *(small.address(place) for place in (*read, *written)),
            source.columns, source.row_quads, self.group_blocks, parts, tiles, self.share, programs, self.all_blocks,
            mode.step, Address(Slot.SCALES) if mode.step > 1 and self.probe is None else 0,
        )  # fmt: skip
        kernel = triton_kernel("survey.survey", constants, SEARCH_LANES // 32)
        return Command(kernel, (groups * parts, small.candidates), arguments)


def survey_of(
    launch: Launch, headroom: tuple[float, ...], probe: Trial | None, share: int = 1, repairs: bool = False
) -> Survey:
    """The choice among candidates, and among all that are probed where a sample speaks for them."""
    return Survey(launch, headroom if probe is None else probe.candidates, share, repairs, probe)


@functools.lru_cache(maxsize=64)
def headroom_on(headroom: tuple[float, ...], device: str) -> torch.Tensor:
    """The bits of the candidates, as float64, on a device."""
    import torch

    return torch.from_numpy(np.array(headroom, np.float64).view(np.int64)).to(device)
