"""A plan cut into parts: each has what is needed to write some of its shards, and nothing else.

A part is a plan itself. Its bytes are those of the whole plan, because it holds the units that share a tensor scale
with its own, wherever they are written: those are read again, not written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from halfbyte.checkpoint.execute.pool import shard_bytes
from halfbyte.checkpoint.plan.types import Plan, Shard, Unit

LARGEST = 1 << 30
"""Source bytes up to which small shards become one part."""
ROUNDS = 4
"""Parts per place that works, at least: with fewer, some places would wait for the last one."""


@dataclass(frozen=True)
class Part:
    """Shards that one task writes."""

    plan: Plan
    names: tuple[str, ...]
    bytes: int
    """Of the source."""

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(shard for shard in self.plan.shards if shard.name in self.names)

    @property
    def files(self) -> frozenset[str]:
        """The source files that it reads."""
        return frozenset(file.name for file in self.plan.files)


class Parts:
    """Makes the parts of a plan, each when it is asked for: all at once would be as large as the plan."""

    def __init__(self, plan: Plan) -> None:
        self.plan = replace(plan, source=plan.source.absolute())
        self._members: dict[int, list[tuple[int, Unit]]] = {}
        """Group → the numbers of the shards of its units, and the units."""
        for number, shard in enumerate(plan.shards):
            for unit in shard.units:
                if unit.group >= 0:
                    self._members.setdefault(unit.group, []).append((number, unit))

    def cut(self, shards: Sequence[Shard], places: int) -> list[tuple[str, ...]]:
        """Names of the shards of each part, the largest part first. places: how many can be worked on at once."""
        sizes = {shard.name: shard_bytes(shard) for shard in shards}
        target = min(LARGEST, sum(sizes.values()) // (ROUNDS * max(1, places)))
        parts: list[list[str]] = []
        held = 0
        for name, size in sizes.items():
            if parts and held + size <= target:
                parts[-1].append(name)
                held += size
            else:
                parts.append([name])
                held = size
        return sorted(map(tuple, parts), key=lambda names: (-sum(sizes[name] for name in names), names))

    def make(self, names: Sequence[str]) -> Part:
        """The part that writes these shards."""
        numbers = [number for number, shard in enumerate(self.plan.shards) if shard.name in names]
        groups = {unit.group: None for number in numbers for unit in self.plan.shards[number].units if unit.group >= 0}
        renumbered = {group: number for number, group in enumerate(groups)}
        others: dict[int, list[Unit]] = {}
        for group in groups:
            for number, unit in self._members[group]:
                if number not in numbers:
                    others.setdefault(number, []).append(unit)
        shards = []
        for number in sorted({*numbers, *others}):
            shard = self.plan.shards[number]
            if number in others:
                order = {id(unit): place for place, unit in enumerate(shard.units)}
                units = sorted(others[number], key=lambda unit: order[id(unit)])
                shard = replace(shard, header=b"", size=0, copies=(), units=tuple(units))
            units = [replace(unit, group=renumbered.get(unit.group, -1)) for unit in shard.units]
            shards.append(replace(shard, units=tuple(units)))
        plan = self._narrow(tuple(shards), tuple(self.plan.groups[group] for group in groups))
        return Part(plan, tuple(names), sum(shard_bytes(self.plan.shards[number]) for number in numbers))

    def _narrow(self, shards: tuple[Shard, ...], groups: tuple[tuple[str, ...], ...]) -> Plan:
        """A plan of some shards, with the files and statistics that they need."""
        read = set(_files(shards))
        modules = {unit.module for shard in shards for unit in shard.units}
        calibrated, solved = self.plan.calibrated, self.plan.solved
        if calibrated is not None:
            names = {module: found for module, found in calibrated.names.items() if module in modules}
            calibrated = replace(calibrated, path=calibrated.path.absolute(), names=names, fallback={})
        if solved is not None:
            known = {module: found for module, found in solved.names.items() if module in modules}
            solved = replace(solved, path=solved.path.absolute(), names=known)
        return replace(
            self.plan,
            files=tuple(file for file in self.plan.files if file.name in read),
            side_files=(),
            shards=shards,
            groups=groups,
            kept={},
            dropped={},
            left_out={},
            notes=(),
            json_files={},
            calibrated=calibrated,
            solved=solved,
        )


def _files(shards: Sequence[Shard]) -> Iterator[str]:
    for shard in shards:
        yield from (copy.file for copy in shard.copies)
        yield from (file for unit in shard.units for source in unit.sources for file in source.files)
