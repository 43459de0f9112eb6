"""What is done to the rows of a unit: quantize, cast, relayout, decode, gather. A piece is read, computed and written.

A worker owns an arena; nothing here keeps memory between pieces but what the caller holds on purpose.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from halfbyte.backends.encoding import Encoder
from halfbyte.backends.headroom import ALONE, Total, Trial, best, merged, widened
from halfbyte.casting.optimal import write
from halfbyte.checkpoint.execute.bad_values import BadModules
from halfbyte.checkpoint.execute.calibrated import Calibrator, SolvedCodes
from halfbyte.checkpoint.execute.cast import choose_scale, stored_scales
from halfbyte.checkpoint.execute.encoded import EncodingInput, encode_piece, encoder_for
from halfbyte.checkpoint.execute.engine import Engine
from halfbyte.checkpoint.execute.group import Group
from halfbyte.checkpoint.execute.pieces import SLACK, Piece, Sizes, largest_piece, pieces_of
from halfbyte.checkpoint.execute.reading import Key, Reading
from halfbyte.checkpoint.execute.scalars import scalar_of
from halfbyte.checkpoint.execute.smoothed import rescaled, values_dtype
from halfbyte.checkpoint.execute.writer import ShardWriter
from halfbyte.checkpoint.io.buffers import Arena
from halfbyte.checkpoint.io.decode import fp8_amax, read_block_scales
from halfbyte.checkpoint.io.files import Files
from halfbyte.checkpoint.io.views import find_amax, read_rows_amax
from halfbyte.checkpoint.plan.types import Output, Unit
from halfbyte.codec.bits import U8, widen
from halfbyte.errors import CheckpointError

MANY = 8
"""Workers that wait for memory more than for their own work."""


@dataclass(frozen=True)
class FirstLook:
    """What is known of a group before its headroom is chosen."""

    amax: np.float32
    candidates: tuple[float, ...]
    probe: Trial | None
    """What decides whether there are further candidates."""


class UnitWork(Reading):
    """Reads, computes and writes pieces for one run."""

    def __init__(self, files: Files, engine: Engine, codes: Calibrator | SolvedCodes | None = None) -> None:
        super().__init__(files)
        self.engine = engine
        self.codes = codes
        """Where codes come from, if not from the engine alone."""
        self.workers = 1
        """How many work at the same time."""
        self.bad = BadModules()
        self.on_cpu = 0
        """Pieces that were computed on the CPU because no other device had memory for them."""

    def arena(self, size: int) -> contextlib.AbstractContextManager[Arena]:
        """The buffers of one worker."""
        return contextlib.nullcontext(Arena(size))

    def holds(self, units: Sequence[Unit], members: Sequence[Unit], sizes: Sizes) -> bool:
        """Whether one worker can hold these units from the first pass to the second. `members`: all that it surveys."""
        held = sum(unit.source_bytes for unit in units)
        extra = max(largest_piece(unit, sizes.chunk) for unit in (*units, *members))
        return held + extra + SLACK * len(units) <= sizes.arena and held <= 16 * sizes.chunk

    def whole(
        self,
        units: Sequence[Unit],
        members: Sequence[Unit],
        group: Group | None,
        writer: ShardWriter,
        chunk: int,
        arena: Arena,
    ) -> None:
        """Both passes by one worker. Raw bytes are kept from the first to the second if the arena has room for them.

        members: those whose amax makes the scale of the group; empty if another worker finds it.
        """
        mine = {unit.module for unit in units}
        cut = {unit.module: list(pieces_of(unit, chunk)) for unit in (*units, *members)}
        held_bytes = sum(unit.source_bytes + SLACK for unit in units)
        keeps = (
            bool(members)
            and not self._reads_twice(members)
            and held_bytes + max(largest_piece(unit, chunk) for unit in members) <= arena.left
        )
        held = {}
        if group is not None and members:
            for unit in members:
                for piece in cut[unit.module]:
                    raw = self.survey(unit, piece, group, arena, keeps and unit.module in mine)
                    if raw is not None:
                        held[unit.module, piece.number] = raw
            self.settle(members, group, chunk, arena, held)
        elif group is not None:
            group.wait(writer.stop)
        for unit in reversed(units):  # what was read last may still be in the cache
            for piece in reversed(cut[unit.module]):
                self.write(unit, piece, held.get((unit.module, piece.number)), group, writer, arena)
            self.forget(unit)

    def _reads_twice(self, members: Sequence[Unit]) -> bool:
        """Whether both passes read, through a small buffer that stays in the cache, instead of holding the bytes.

        That spares memory, which many workers share, and costs each a second copy.
        """
        if self.workers < MANY:
            return False
        size = sum(source.rows * source.columns for unit in members for source in unit.sources)
        if any(self.encoder(unit) is None for unit in members) or self.engine.headrooms(size) != ALONE:
            return False
        return all(
            self.files.is_cached_here(file) for unit in members for source in unit.sources for file in source.files
        )

    def survey(
        self, unit: Unit, piece: Piece, group: Group, arena: Arena, keep: bool = False
    ) -> npt.NDArray[Any] | None:
        """First pass: read a piece and add to the scale that its group shares. `keep`: its bytes stay in the arena."""
        mark = arena.mark()
        source = unit.sources[piece.source]
        if source.kind == "float" and source.weight.contiguous and unit.factors is None:
            if not keep:
                amax = find_amax(self.files, source.weight, piece.start, piece.stop, arena)
                if np.isfinite(amax):
                    group.add(amax)
                    return None
            raw, amax = read_rows_amax(self.files, source.weight, piece.start, piece.stop, arena)
            self._take_in(unit, piece, group, amax, raw, arena)
            return self._kept(raw, keep, mark, arena)
        raw = self.read(unit, piece, arena)
        behind = arena.mark()
        if unit.action == "cast":
            rows = self._rows(unit, piece, raw, arena)
            if rows.scales.size and int(rows.scales.max()) == 255:
                self.bad.add_scales(unit, piece.source, piece.start, rows.scales)
                group.bad = True
            else:
                group.add(np.float32(0), rows.exponents)
        else:
            amax = self._amax(unit, piece, raw, arena)
            arena.release(behind)
            self._take_in(unit, piece, group, amax, raw, arena)
        arena.release(behind)
        return self._kept(raw, keep, mark, arena)

    def _kept(self, raw: npt.NDArray[Any], keep: bool, mark: int, arena: Arena) -> npt.NDArray[Any] | None:
        if keep:
            return raw
        arena.release(mark)
        return None

    def _take_in(
        self, unit: Unit, piece: Piece, group: Group, amax: np.float32, raw: npt.NDArray[Any], arena: Arena
    ) -> None:
        """Add the amax of a piece to its group, or note the values that no scale fits."""
        if np.isfinite(amax):
            group.add(amax)
            return
        mark = arena.mark()
        self.bad.add_values(unit, piece.source, piece.start, self._values(unit, piece, raw, arena))
        group.bad = True
        arena.release(mark)

    def _amax(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> np.float32:
        """The largest magnitude of a piece that was read; NaN if there is one."""
        source = unit.sources[piece.source]
        if source.kind == "fp8" and unit.factors is None:
            return fp8_amax(source, raw, piece.start, self.scales_for(unit, piece.source))
        return self.engine.amax(self._values(unit, piece, raw, arena))

    def settle(
        self, units: Sequence[Unit], group: Group, chunk: int, arena: Arena, held: Mapping[Key, npt.NDArray[Any]] = {}
    ) -> None:
        """Between the passes: the tensor scale that `units` share, from all that was found.

        held: pieces that are still in memory, by module and number. Others are read again if they are needed.
        """
        unit, modules = units[0], ", ".join(group.modules)
        if len({unit.action for unit in units}) > 1:
            raise CheckpointError(
                f"{modules} share a tensor scale, but only some are MXFP4; --keep them, or convert to bf16 first"
            )
        if group.bad:
            pass
        elif unit.action == "cast":
            group.choice = choose_scale(units, group.exponents, lambda: self._all_rows(units, chunk, arena))
            group.scales = stored_scales(group.choice)
        else:
            usable = self.engine.usable_amax(group.amax, modules)
            if isinstance(self.codes, SolvedCodes):
                group.amax = self.codes.amax(units, group.amax, usable)
            elif usable == group.amax:
                group.amax = self._raised(units, usable, chunk, arena, held)
            else:
                group.amax = usable
            group.scales = self.engine.tensor_scales(group.amax, self._counted_dtype(unit))
        group.ready.set()

    def _raised(
        self,
        units: Sequence[Unit],
        amax: np.float32,
        chunk: int,
        arena: Arena,
        held: Mapping[Key, npt.NDArray[Any]],
    ) -> np.float32:
        """The amax of all units, raised by the headroom with the least error if the method chooses one."""
        size = sum(source.rows * source.columns for unit in units for source in unit.sources)
        candidates = self.engine.headrooms(size)
        if candidates == ALONE or amax == 0:
            return amax
        first = FirstLook(amax, candidates, self.engine.probe(size))
        chosen = self._look(units, first, chunk, arena, held)
        if isinstance(chosen, tuple):
            (parts,) = self._totals(units, amax, [Trial(chosen)], chunk, arena, held)
            chosen = best(chosen, merged(parts))
        return np.float32(widened(amax, chosen))

    def _look(
        self,
        units: Sequence[Unit],
        first: FirstLook,
        chunk: int,
        arena: Arena,
        held: Mapping[Key, npt.NDArray[Any]],
    ) -> float | tuple[float, ...]:
        """The headroom if one look at every piece tells; otherwise the candidates, for which all are searched."""
        between = self.engine.between(first.amax, first.candidates, self._counted_dtype(units[0]))
        if between is None and first.probe is None:
            return first.candidates
        totals = []
        for unit, piece, raw in self._all_pieces(units, chunk, arena, held):
            values = self._counted(unit, piece, raw, arena)
            if first.probe is not None:
                totals.append(self.engine.survey(values, first.amax, first.probe, piece.start))
            if between is not None:
                self.engine.take_in(between, values)
        if first.probe is not None and first.probe.finds(merged(totals)):
            return first.probe.candidates
        chosen = None if between is None else between.headroom()
        return first.candidates if chosen is None else chosen

    def _totals(
        self,
        units: Sequence[Unit],
        amax: np.float32,
        trials: Sequence[Trial],
        chunk: int,
        arena: Arena,
        held: Mapping[Key, npt.NDArray[Any]],
    ) -> list[list[tuple[Total, ...]]]:
        """For each trial what each of its candidates costs, in parts whose sums are added. Everything is read once."""
        pieces = self._all_pieces(units, chunk, arena, held)
        parts = [self._piece_totals(unit, piece, raw, amax, trials, arena) for unit, piece, raw in pieces]
        return [list(of_trial) for of_trial in zip(*parts, strict=True)]

    def _piece_totals(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any],
        amax: np.float32,
        trials: Sequence[Trial],
        arena: Arena,
    ) -> list[tuple[Total, ...]]:
        values = self._counted(unit, piece, raw, arena)
        return [self.engine.survey(values, amax, trial, piece.start) for trial in trials]

    def _counted_dtype(self, unit: Unit) -> np.dtype[Any]:
        """The dtype that the values of a unit count as: with statistics float32."""
        return values_dtype(unit) if self.codes is None else np.dtype(np.float32)

    def _counted(self, unit: Unit, piece: Piece, raw: npt.NDArray[Any], arena: Arena) -> npt.NDArray[Any]:
        """The values of a piece as they are quantized."""
        values = self._values(unit, piece, raw, arena)
        return values if self.codes is None else np.ascontiguousarray(widen(values))

    def write(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any] | None,
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> None:
        """Second pass: the outputs of a piece. A shard of which a module has bad values is not written further."""
        if group is not None and group.bad:
            writer.spoil()
        if writer.spoiled and (group is not None or unit.action != "quantize"):
            return
        mark = arena.mark()
        if self._encode(unit, piece, raw, group, writer, arena):
            return
        if raw is None:
            raw = self.read(unit, piece, arena)
        if unit.action in ("decode", "gather", "rescale"):
            if unit.action == "decode":
                values = self._plain(unit, piece, raw, arena)
            else:
                values = raw if unit.factors is None else rescaled(unit, unit.factors, piece, raw)
            writer.put_all([self._place(unit, unit.outputs[0], values, piece)])
        elif (blocks := self._blocks(unit, piece, raw, group, writer, arena)) is not None:
            self._put_blocks(writer, unit, piece, blocks, group)
        arena.release(mark)

    def encoder(self, unit: Unit) -> Encoder | None:
        """What takes whole pieces of a unit from the source to the shard in one call, if anything does."""
        return None if self.codes is not None else encoder_for(self.engine, unit)

    def _encode(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any] | None,
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> bool:
        """Quantize, hash and write a piece in one call, if that is possible. Without `raw` it is read on the way."""
        encoder = self.encoder(unit)
        if encoder is None or arena.left < encoder.room:
            return False
        amax = None if group is None else float(group.amax)
        if not encode_piece(encoder, self.files, unit, piece, EncodingInput(raw, amax), writer, arena):
            return False
        self._put_scalars(writer, unit, piece, group)
        return True

    def _put_blocks(
        self, writer: ShardWriter, unit: Unit, piece: Piece, blocks: tuple[U8, U8], group: Group | None
    ) -> None:
        """Write the packed codes and scale bytes of a piece, and with the first one the tensor's scalars."""
        parts = {"codes": blocks[0], "scales": blocks[1]}
        writer.put_all(
            [
                self._place(unit, output, parts[output.part.role], piece)
                for output in unit.outputs
                if output.part.role in parts
            ]
        )
        self._put_scalars(writer, unit, piece, group)

    def _put_scalars(self, writer: ShardWriter, unit: Unit, piece: Piece, group: Group | None) -> None:
        """The tensor's scalars, with its first piece."""
        if piece.number == 0:
            for output in unit.outputs:
                if output.part.role not in ("codes", "scales"):
                    scales = None if group is None else group.scales
                    writer.put_scalar(output, scalar_of(self.files, unit, output, unit.sources[piece.source], scales))

    def _blocks(
        self,
        unit: Unit,
        piece: Piece,
        raw: npt.NDArray[Any],
        group: Group | None,
        writer: ShardWriter,
        arena: Arena,
    ) -> tuple[U8, U8] | None:
        """Packed codes and scale bytes of a piece; None if it has values that no scale fits."""
        source, rows = unit.sources[piece.source], piece.stop - piece.start
        if unit.action == "relayout":
            return raw, read_block_scales(self.files, source, piece.start, piece.stop, arena)
        if unit.action == "cast":
            if group is None or group.choice is None:
                raise CheckpointError(f"{unit.module} was planned without a group")
            written = write(self._rows(unit, piece, raw, arena), group.choice, threads=1)
            writer.count(unit.module, written.changed)
            return written.codes, written.scales
        values = self._values(unit, piece, raw, arena)
        if group is None and not np.isfinite(self.engine.amax(values)):
            self.bad.add_values(unit, piece.source, piece.start, values)
            writer.spoil()
            return None
        if self.codes is not None:
            return self.codes.blocks(unit, piece, values, None if group is None else group.amax)
        codes, out = self._outputs(rows, source.columns, arena)
        self.engine.quantize(values, None if group is None else group.amax, codes, out)
        return codes, out

    def _outputs(self, rows: int, columns: int, arena: Arena) -> tuple[U8, U8]:
        """Room for packed codes and scale bytes."""
        width, blocks = self.engine.widths(columns)
        return arena.take(rows * width).reshape(rows, width), arena.take(rows * blocks).reshape(rows, blocks)

    def _place(
        self, unit: Unit, output: Output, data: npt.NDArray[Any], piece: Piece
    ) -> tuple[Output, npt.NDArray[Any], int]:
        """Rows with their position in the tensor; a transposed tensor takes a whole matrix at a time."""
        first = sum(earlier.rows for earlier in unit.sources[: piece.source]) + piece.start
        if output.part.transposed:
            data = np.ascontiguousarray(data.T)
            return output, data, piece.source * data.nbytes
        return output, data, first * (data.nbytes // len(data))
